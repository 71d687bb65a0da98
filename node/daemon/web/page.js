"use strict";
const REASONS = ["steps", "wait", "transfer", "encode", "fold", "checkpoint", "evaluate", "audit", "recompute", "start", "down"];
const ASK_MS = 800, ANSWER_MS = 10000, ROWS = 300, BARS = 60, AFRESH = 150, LINES = 200, EVENTS = 50, WORK = 24, BIG = [1150, 240], LEFT = 44, LOW = 18, TOP = 8;
const TROUBLES = ["trouble", "failed", "alone", "divergence", "equivocation", "peer_fault", "payload_damaged", "refused"];
const LASTING = ["training", "observing", "finished"];
const ICONS = {bad: "%23d33", warn: "%23e0a030", good: "%231b7f4b"};
const rows = new Map(), work = new Map();
let next = 0, logNext = 0, eventNext = 0, asked = 0, life = "", heard = 0, older = [], shown = null, isLog = false, byTokens = true;

const at = id => document.getElementById(id);
const write = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const tail = peer => peer ? "…" + peer.slice(-8) : "–";
// A name is a claim that others may make too: the PeerID stands before it.
const called = (peer, name) => tail(peer) + (name ? " " + name : "");
const exact = (value, digits) => value === null ? "–" : value.toFixed(digits);

function short(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const [step, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([step]) => Math.abs(value) >= step) || [1, ""];
  return `${Number((value / step).toPrecision(3))} ${letter}${unit}`.trim();
}

function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 90) return seconds.toFixed(1) + " s";
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (minutes < 90) return minutes + " min";
  return hours < 48 ? hours + " h " + minutes % 60 + " min" : Math.floor(hours / 24) + " d " + hours % 24 + " h";
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function html(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function pairs(id, told) {
  at(id).replaceChildren(...told.map(([name, text]) => {
    const pair = html("div");
    pair.append(html("dt", name), html("dd", text));
    return pair;
  }));
}

function entry(kind, text) {
  const item = html("li"), sample = svg("svg", {viewBox: "0 0 10 10", "aria-hidden": "true"});
  sample.append(svg("rect", {class: kind, ...shapeOf(kind, 0, 10)}));
  item.append(sample, text);
  return item;
}

// Forms differ, not colours alone: a late contribution fills half of its place, a missing one is a frame.
function shapeOf(kind, x, size) {
  if (kind === "late") return {x, y: size / 2, width: size, height: size / 2};
  return kind === "missing" || kind === "open" ? {x: x + 1, y: 1, width: size - 2, height: size - 2} : {x, y: 0, width: size, height: size};
}

const ours = {
  loss: new Chart("loss", "Training loss", [{name: "this node", color: "--steps"}, {name: "members' mean", color: "--mark"}], 3),
  valid: new Chart("valid", "Validation loss", [{name: "bits per byte", color: "--mark"}], 3),
  bytes: new Chart("bytes", "Traffic", [{name: "sent", color: "--steps"}, {name: "received", color: "--mark"}], null),
  speed: new Chart("speed", "Speed", [{name: "tokens/s", color: "--steps"}], null),
};

function meanLoss(row) {
  const found = work.get(row.round);
  if (!found) return null;
  let sum = 0, tokens = 0;
  found.peers.forEach((peer, place) => {
    if (!row.contributors.includes(peer)) return;
    sum += found.loss[place] * found.tokens[place];
    tokens += found.tokens[place];
  });
  return tokens ? sum / tokens : null;
}

function total(row) {
  return REASONS.reduce((sum, reason) => sum + row[reason + "_s"], 0);
}

function charts(list) {
  let sum = older.length ? older[older.length - 1].tokens : 0;
  const tokens = [...older.map(point => point.tokens), ...list.map(row => sum += row.tokens)];
  const inTokens = byTokens && sum > 0, none = older.map(() => null);
  const xs = inTokens ? tokens : [...older, ...list].map(row => row.round), name = inTokens ? "tokens" : "round";
  const closed = value => [...none, ...list.map(row => row.digest ? value(row) : null)];
  ours.loss.draw(xs, [[...older, ...list].map(row => row.train_loss), [...none, ...list.map(meanLoss)]], name, isLog);
  ours.valid.draw(xs, [[...older, ...list].map(row => row.val_bpb)], name, isLog);
  ours.bytes.draw(xs, [closed(row => row.bytes_up), closed(row => row.bytes_down)], name, false);
  ours.speed.draw(xs, [closed(row => row.tokens && total(row) > 0 ? row.tokens / total(row) : null)], name, false);
}

function bars(list) {
  const last = list.slice(-BARS), high = Math.max(...last.map(total), 0);
  if (!high) { at("rounds").replaceChildren(html("p", "nothing yet")); return; }
  const [wide, tall] = BIG, root = svg("svg", {viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": "Seconds of each round"});
  const y = value => TOP + (high - value) / high * (tall - TOP - LOW), step = (wide - LEFT) / Math.max(last.length, 12);
  for (const tick of niceTicks(0, high)) {
    root.append(svg("line", {x1: LEFT, x2: wide, y1: y(tick), y2: y(tick), class: "grid"}));
    root.append(svg("text", {x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end"}, short(tick)));
  }
  root.append(svg("text", {x: LEFT, y: tall - 3}, `round ${last[0].round} to ${last[last.length - 1].round}`));
  last.forEach((row, place) => {
    let below = 0;
    for (const reason of REASONS) {
      const seconds = row[reason + "_s"];
      if (seconds <= 0) continue;
      const bar = svg("rect", {
        class: reason, x: LEFT + place * step, width: Math.max(1, step - 2), y: y(below + seconds), height: y(below) - y(below + seconds),
      });
      const whole = `${span(seconds)} of ${span(total(row))}`;
      bar.append(svg("title", {}, `round ${row.round}: ${reason} ${whole}; ${row.contributors.length} contributions, ${row.final ? "final" : "open"}`));
      root.append(bar);
      below += seconds;
    }
  });
  at("rounds").replaceChildren(root);
}

function shares(now) {
  const spent = now.goodput ? now.goodput.window : null;
  const whole = spent ? REASONS.reduce((sum, reason) => sum + spent[reason + "_s"], 0) : 0;
  write("window", whole ? "of the last " + span(now.goodput.window_s) : "");
  const root = svg("svg", {viewBox: `0 0 ${BIG[0]} 16`, preserveAspectRatio: "none", role: "img", "aria-label": "Shares of the time"});
  let before = 0;
  const legend = REASONS.map(reason => {
    const share = whole ? spent[reason + "_s"] / whole : 0;
    root.append(svg("rect", {class: reason, x: before * BIG[0], width: share * BIG[0], y: 0, height: 16}));
    before += share;
    return entry(reason, `${reason} ${(share * 100).toFixed(1)} %`);
  });
  at("shares").replaceChildren(root);
  at("sharesLegend").replaceChildren(...legend);
  return whole ? (spent.steps_s / whole * 100).toFixed(1) + " %" : "–";
}

function auditsText(standing) {
  return standing && standing.audits_made !== null ? standing.audits_adopted + " / " + standing.audits_made : "–";
}

function facts(now, goodput) {
  pairs("facts", [
    ["final round", now.final < 0 ? "–" : String(now.final)], ["goodput", goodput],
    ["training loss", exact(now.train_loss, 3)], ["validation, bits/byte", exact(now.val_bpb, 3) + (now.val_by ? " by " + called(now.val_by, now.names[now.val_by]) : "")], ["roles", now.roles.join(", ")],
    ["validated rounds", String(now.validated)], ["audits adopted / made", auditsText(now.standing)], ["served", short(now.blob_bytes_up, "B")], ["relayed", now.relay ? short(now.relay.bytes_relayed, "B") : "–"],
    ["tokens/s", short(now.tokens_per_s)], ["members", String(now.members)], ["connections", String(now.peers)],
    ["sent", short(now.bytes_up, "B")], ["received", short(now.bytes_down, "B")], ["payload", short(now.payload_bytes, "B")],
    ["device", now.device], ["counts", now.standing ? now.standing.why || "in full" : "–"], ["reachability", now.reachability], ["up for", span(now.uptime_s)],
    ...(now.privacy ? [["privacy", privacyText(now.privacy)]] : []),
  ]);
}

function privacyText(privacy) {
  const most = privacy.most === null ? "" : ` of ${privacy.most}`;
  return `ε ${Number(privacy.epsilon.toPrecision(3))}${most}` + (privacy.spent ? ", trains no more" : "");
}

function resources(now, use) {
  const cores = value => value === null ? "–" : `${(value * 100).toFixed(1)} % of a core`;
  const of = (free, all) => free === null ? "–" : `${short(free, "B")} of ${short(all, "B")}`;
  pairs("use", [
    ["daemon", cores(use.daemon_cores)], ["its memory", short(use.daemon_bytes, "B")],
    ["worker", cores(use.worker_cores)], ["its memory", short(use.worker_bytes, "B")],
    ["cores of the machine", String(use.cores)], ["free memory", of(use.memory_free_bytes, use.memory_bytes)],
    ["free disk", of(use.disk_free_bytes, use.disk_bytes)], ["worker restarts", String(now.worker_restarts)],
    ["network restarts", String(now.host_restarts)],
  ]);
}

function workOf(peer, list) {
  const kinds = list.map(row => {
    if (row.contributors.includes(peer)) return "in";
    const found = work.get(row.round);
    if (found && found.peers.includes(peer)) return row.final ? "late" : "open";
    return row.final ? "missing" : "";
  });
  const count = kind => kinds.filter(found => found === kind).length;
  const label = `${count("in")} of ${list.length} rounds, ${count("late")} late, ${count("missing")} missing`;
  const root = svg("svg", {viewBox: `0 0 ${WORK * 10} 10`, role: "img", "aria-label": label, class: "work"});
  kinds.forEach((kind, place) => {
    if (!kind) return;
    const cell = svg("rect", {class: kind, ...shapeOf(kind, place * 10, 9)});
    cell.append(svg("title", {}, `round ${list[place].round}: ${NAMES[kind]}`));
    root.append(cell);
  });
  return root;
}

const NAMES = {in: "in the set", late: "came too late for the final set", open: "announced, not in a set yet", missing: "nothing"};

function newestLoss(peer, list) {
  for (let place = list.length - 1; place >= 0; place--) {
    const found = work.get(list[place].round), index = found ? found.peers.indexOf(peer) : -1;
    if (index >= 0) return found.loss[index];
  }
  return null;
}

function swarm(now, list, known) {
  const last = list.filter(row => row.digest || work.has(row.round)).slice(-WORK);
  const me = {
    peer: now.peer, name: now.name, path: "this node", rtt_s: null, member: true, activity: now.activity, round: now.round,
    tokens_per_s: now.tokens_per_s, heard_s: null, faults: 0, standing: now.standing,
  };
  const named = new Set([now.peer, ...known.map(peer => peer.peer)]);
  const gone = [...new Set(last.flatMap(row => row.contributors))].filter(peer => !named.has(peer)).map(peer => ({
    peer, name: "", path: "", rtt_s: null, member: false, activity: "", round: null, tokens_per_s: null, heard_s: null, faults: 0, standing: null,
  }));
  const line = peer => {
    const row = html("tr"), newest = html("td");
    newest.append(workOf(peer.peer, last));
    const cells = [
      peer.path || "not connected", peer.activity || "no member", peer.round === null ? "–" : String(peer.round),
      exact(newestLoss(peer.peer, last), 3), short(peer.tokens_per_s), newest, span(peer.rtt_s), span(peer.heard_s), String(peer.faults),
      peer.standing ? peer.standing.why || "in full" : "–",
    ];
    const name = html("td", called(peer.peer, peer.name));
    name.title = peer.peer;
    row.append(name, ...cells.map(cell => typeof cell === "string" ? html("td", cell) : cell));
    return row;
  };
  const head = html("tr"), range = last.length ? `rounds ${last[0].round} to ${last[last.length - 1].round}` : "rounds";
  head.append(...["peer", "path", "does", "round", "loss", "tokens/s", range, "round trip", "heard before", "faults", "counts"].map(text => {
    const cell = html("th", text);
    cell.scope = "col";
    return cell;
  }));
  at("peersHead").replaceChildren(head);
  at("peers").replaceChildren(...[me, ...known, ...gone].map(line));
}

// The model's text is text, never markup: it repeats what anybody may have written.
function sample(wrote) {
  const by = wrote.round === null ? "" : wrote.round < 0 ? "by the weights that the run began with" : `by final round ${wrote.round}`;
  write("sampleNote", by && `${by}, ${new Date(wrote.unix_s * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`);
  write("sample", wrote.text);
  write("sampleWhy", wrote.why && `${wrote.text ? "none that is newer" : "none"}: ${wrote.why}`);
}

function alarms(data) {
  const now = data.status, worst = data.alarms.length ? data.alarms[0].level : "good";
  const texts = data.alarms.map(alarm => `${alarm.word}: ${alarm.text}`);
  const before = [...at("alarms").children].map(item => item.textContent);
  if (texts.join("\n") !== before.join("\n")) {
    at("alarms").replaceChildren(...data.alarms.map((alarm, place) => html("li", texts[place], alarm.level)));
  }
  document.body.dataset.level = worst;
  document.title = `${worst === "bad" ? "! " : ""}${now.activity} · round ${now.round} · atoll`;
  const icon = `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'><circle cx='4' cy='4' r='4' fill='${ICONS[worst]}'/></svg>`;
  if (at("icon").href !== icon) at("icon").href = icon;
}

function progress(now, pace) {
  const done = now.activity === "done" || now.activity === "finished" ? now.rounds : now.round;
  at("run").max = now.rounds;
  at("run").value = done;
  const left = pace.left_s === null ? "" : pace.left_s === 0 ? ", complete" : `, about ${span(pace.left_s)} left at ${span(pace.round_s)} a round`;
  write("runText", `round ${now.round} of ${now.rounds}${left}`);
  const job = now.progress, isCounted = job !== null && job.of_bytes !== null;
  at("step").max = isCounted ? job.of_bytes : now.steps || 1;
  at("step").value = isCounted ? job.done_bytes : now.step;
  const fetched = isCounted ? `: ${short(job.done_bytes, "B")} of ${short(job.of_bytes, "B")}` : "";
  const steps = now.activity === "training" ? `step ${now.step} of ${now.steps}` : now.activity;
  write("stepText", job ? `${job.work}${fetched}, ${span(job.took_s)} so far` : steps);
}

function left(now) {
  if (now.eta_s !== null) return `about ${span(now.eta_s)} left`;
  return LASTING.includes(now.activity) ? "" : "time left unknown";
}

// Appends what is new, and follows the end where the reader is there.
function feed(id, news, before, most, item) {
  const list = at(id), isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
  if (news.next < before) list.replaceChildren();
  list.append(...news.lines.map(item));
  while (list.children.length > most) list.firstChild.remove();
  if (isAtEnd && news.lines.length) list.scrollTop = list.scrollHeight;
  return news.next;
}

function log(news) {
  logNext = feed("lines", news, logNext, LINES, line =>
    html("li", `${line.time.slice(11, 23)} ${line.level} ${line.logger.replace(/^atoll\./, "")}: ${line.message}`, line.level));
  write("linesNote", logNext ? "newest last" : "not shown to other machines");
}

function events(news, isShown) {
  eventNext = feed("events", news, eventNext, EVENTS, line => {
    const time = new Date(line.unix_s * 1000).toISOString().slice(0, 19).replace("T", " ");
    return html("li", `${time} ${line.event} ${line.text}`, TROUBLES.includes(line.event) ? "warning" : "");
  });
  write("eventsNote", eventNext ? "newest last, UTC" : isShown ? "none yet" : "not shown to other machines");
}

function draw(data) {
  const now = data.status;
  shown = data;
  write("title", `${called(now.peer, now.name)} · run ${now.run_name}`);
  write("activity", now.activity);
  write("reason", now.reason ? "– " + now.reason : "");
  write("eta", left(now));
  alarms(data);
  progress(now, data.pace);
  facts(now, shares(now));
  resources(now, data.resources);
  sample(data.sample);
  caps(now.limits);
  const list = [...rows.values()].sort((one, other) => one.round - other.round);
  charts(list);
  bars(list);
  write("paths", Object.entries(now.paths).map(([path, count]) => `${count} ${path}`).join(", "));
  swarm(now, list, data.peers);
}

function keep(data) {
  const now = data.status.run + "/" + data.status.pid;
  if (now !== life && life) {
    rows.clear(); work.clear();
    next = 0; logNext = 0; eventNext = 0; asked = 0; life = now;
    at("lines").replaceChildren();
    at("events").replaceChildren();
    return false;
  }
  life = now;
  if (data.older !== null) { rows.clear(); older = data.older; }
  for (const row of data.rounds) rows.set(row.round, row);
  for (const found of data.work) work.set(found.round, found);
  for (const round of [...rows.keys()].sort((one, other) => one - other).slice(0, -ROWS)) {
    const row = rows.get(round), before = older.length ? older[older.length - 1].tokens : 0;
    older.push({round, tokens: before + row.tokens, train_loss: row.train_loss, val_bpb: row.val_bpb});
    rows.delete(round);
    work.delete(round);
  }
  next = data.next;
  return true;
}

async function ask() {
  if (document.hidden) return;
  const since = asked % AFRESH ? next : 0;
  const answer = await fetch(`v1/data.json?since=${since}&log=${logNext}&event=${eventNext}`, {cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS)});
  if (!answer.ok) throw new Error("the node answered " + answer.status);
  const data = await answer.json();
  if (!keep(data)) return;
  asked++;
  heard = Date.now();
  write("silent", "");
  draw(data);
  log(data.log);
  events(data.events, data.log.next > 0);
}

async function forever() {
  for (;;) {
    try {
      await ask();
    } catch (error) {
      const ago = heard ? ", heard " + span((Date.now() - heard) / 1000) + " ago" : "";
      write("silent", `no answer from the node${ago}`);
    }
    await new Promise(done => setTimeout(done, ASK_MS));
  }
}

function press(id, does) {
  at(id).addEventListener("click", () => {
    const isOn = at(id).getAttribute("aria-pressed") !== "true";
    at(id).setAttribute("aria-pressed", String(isOn));
    does(isOn);
  });
}

async function invite() {
  const answer = await fetch("v1/invite.json", {cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS)});
  if (!answer.ok) throw new Error("the node answered " + answer.status);
  const view = await answer.json();
  write("inviteWhy", view.why || "Whoever opens this invite on a machine with atoll joins the run:");
  write("link", view.link);
  at("copy").hidden = !view.link;
  const size = view.qr.length, dark = [];
  view.qr.forEach((line, y) => [...line].forEach((module, x) => { if (module === "1") dark.push(`M${x} ${y}h1v1h-1z`); }));
  const root = svg("svg", {viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "QR code of the invite", "shape-rendering": "crispEdges"});
  root.append(svg("path", {d: dark.join("")}));
  at("qr").replaceChildren(...(size ? [root] : []));
}

function caps(limits) {
  if (!limits) return;
  const most = bytes => bytes ? short(bytes, "B/s") : "no limit";
  write("limitsNow", `${most(limits.up_bytes_s)} sent, ${most(limits.down_bytes_s)} received${limits.stopped ? "; " + limits.stopped : ""}`);
}

// The session is in this variable alone: a cookie or a store would outlive the page and be open to other programs.
let session = "";

async function post(path, secret, body) {
  return fetch(path, {method: "POST", headers: {Authorization: "Bearer " + secret}, body, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS)});
}

async function begin() {
  const found = /^#token=([\w=-]{20,100})$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  try {
    const answer = await post("v1/session", found[1], "");
    if (!answer.ok) return write("steering", await answer.text());
    session = (await answer.json()).session;
    at("control").hidden = false;
    write("steering", "");
  } catch (error) {
    write("steering", "no answer from the node; `atoll web` gives another address");
  }
}

async function order(ask) {
  write("ordered", "…");
  try {
    const answer = await post("v1/order", session, JSON.stringify({v: 1, ask}));
    if (answer.ok) {
      const done = (await answer.json()).answer;
      return write("ordered", done.hint ? `${done.message}: ${done.hint}` : done.message);
    }
    write("ordered", "");
    write("steering", await answer.text());
    if (answer.status === 401) { session = ""; at("control").hidden = true; }
  } catch (error) {
    write("ordered", "no answer from the node: see above whether it did so");
  }
}

function rate(id) {
  const text = at(id).value.trim();
  return text === "" ? null : text.toLowerCase() === "none" ? "" : text;
}

at("pause").addEventListener("click", () => order({
  type: "pause", reason: at("pauseWhy").value.trim() || "by the operator", for_s: at("pauseFor").value ? Number(at("pauseFor").value) : null}));
at("resume").addEventListener("click", () => order({type: "resume"}));
at("limit").addEventListener("click", () => order({type: "limit", up: rate("upMost"), down: rate("downMost")}));
window.addEventListener("hashchange", begin);
begin();
press("log", isOn => { isLog = isOn; if (shown) draw(shown); });
press("tokens", isOn => { byTokens = isOn; if (shown) draw(shown); });
press("warnings", isOn => at("lines").classList.toggle("few", isOn));
at("whole").addEventListener("click", () => Object.values(ours).forEach(chart => chart.whole()));
at("copy").addEventListener("click", () => navigator.clipboard.writeText(at("link").textContent).then(
  () => write("copied", "copied"), () => write("copied", "the browser refused; mark the invite and copy it")));
at("showInvite").addEventListener("click", () => {
  const isOpen = at("invite").hidden;
  at("invite").hidden = !isOpen;
  at("showInvite").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) invite().catch(() => write("inviteWhy", "no answer from the node"));
});
at("workLegend").replaceChildren(...Object.keys(NAMES).map(kind => entry(kind, NAMES[kind])));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown) draw(shown); });
forever();
