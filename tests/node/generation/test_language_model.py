"""The same tokens with a cache in transformers, without one there, and by our own decoder, which has none."""

import pytest
import torch
from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import Snapshot
from atoll.node.generation.options import TextOptions
from atoll.node.import_export.huggingface.folder import save_folder
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json, tokenizer_files
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.model.genesis import genesis
from atoll.node.runs.presets import preset
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.sections.serving import SamplingSpec, ServingSpec
from tests.later import GROUP, loading, transformers

pytestmark = GROUP

torch.set_num_threads(1)
DENSE = ModelSpec(
    dim=64, layers=3, heads=4, kv_heads=2, ffn=96, vocab=256, context=48, tied=True, rope_theta=5e4, norm_eps=1e-5
)
EXPERTS = ExpertsSpec(count=6, per_token=2, ffn=48)
MIXED = replace(DENSE, qk_norm=True, experts=EXPERTS)
MODELS = {
    "llama": DENSE,
    "gemma": replace(DENSE, gemma=True),
    "qwen3": replace(DENSE, qk_norm=True),
    "qwen3_moe": MIXED,
    "olmoe": replace(MIXED, qk_norm_across=True),
    "mixtral": replace(MIXED, qk_norm=False),
}
OWNER = Identity(bytes(32)).peer_id
PROMPT = list(b"Before we proceed")
LIKELIEST = TextOptions(max_tokens=16, temperature=0)


def theta_of(model):
    """Weights with large logits, so that the likeliest token is no near draw."""
    return {name: torch.from_numpy(value) * 4 for name, value in genesis(model, 3).items()}


def run_of(model, serving=None):
    spec = preset("tiny", OWNER, 1, "synthetic:markov")
    return replace(spec, model=model, serving=serving or spec.serving)


def loaded(model, serving=None, blobs=None):
    arena_C4096 = bridge.gather(theta_of(model), arena_of(model))
    return loading.load_run(run_of(model, serving), Snapshot(arena_C4096, 7, bytes(32)), blobs, "", "cpu")


@pytest.fixture(scope="module")
def dense():
    return loaded(DENSE)


def without_cache(model, prompt, count):
    """Our own decoder, which reads all tokens again for each one."""
    decoder, tokens = Decoder(model), list(prompt)
    bridge.write_atoms(decoder, ((name, value.float() * 2.0**-24) for name, value in theta_of(model).items()))
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return bytes(tokens[len(prompt) :]).decode(errors="replace")


@pytest.mark.parametrize("kind", MODELS)
def test_the_likeliest_tokens_are_those_of_the_decoder_without_a_cache(kind):
    model = loaded(MODELS[kind])
    pieces = []
    answer = model.generate(PROMPT, LIKELIEST, pieces.append)
    assert answer.text == without_cache(MODELS[kind], PROMPT, 16) == "".join(pieces)
    assert (answer.prompt_tokens, answer.tokens, answer.finish) == (len(PROMPT), 16, "length")
    assert len(set(answer.text)) > 2, "a text that says something"


def test_a_folder_gives_the_text_of_its_run_and_of_transformers(tmp_path, dense):
    theta = theta_of(DENSE)
    save_folder(tmp_path / "out", DENSE, theta.__getitem__, tokenizer_files(byte_tokenizer_json(), DENSE.context))
    folder = loading.load_model_folder(tmp_path / "out", "cpu")
    answer = folder.generate(folder.tokens_of("Before we proceed"), LIKELIEST)
    assert answer == dense.generate(PROMPT, LIKELIEST)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([PROMPT])
    for use_cache in (True, False):
        found = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, max_length=None, do_sample=False,
            use_cache=use_cache,
        )  # fmt: skip
        assert bytes(found[0, len(PROMPT) :].tolist()).decode(errors="replace") == answer.text


def test_a_seed_repeats_a_text_and_none_does_not(dense):
    def text(seed, **options):
        return dense.generate(PROMPT, TextOptions(max_tokens=24, seed=seed, **options)).text

    assert text(5) == text(5) != text(6)
    assert len({text(None, temperature=2.0) for _ in range(3)}) > 1
    likeliest = dense.generate(PROMPT, LIKELIEST).text
    assert text(5, top_k=1)[:12] == likeliest[:12], "one token to choose from"
    assert text(5, top_p=1e-6)[:12] == likeliest[:12]


def test_a_stop_text_ends_the_generation_at_its_token(dense):
    whole = dense.generate(PROMPT, LIKELIEST)
    stop = whole.text[5:7]
    cut = dense.generate(PROMPT, LIKELIEST._replace(stop=("never there", stop)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish, cut.tokens < whole.tokens) == ("stop", True)


def test_an_end_token_of_the_run_ends_it_and_is_not_printed(dense):
    likeliest = dense.generate(PROMPT, LIKELIEST).text
    end = next(letter for letter in likeliest if ord(letter) < 128)
    model = loaded(DENSE, ServingSpec(eos=(ord(end),)))
    answer = model.generate(PROMPT, LIKELIEST)
    assert (answer.text, answer.finish) == (likeliest[: likeliest.index(end)], "stop")


def test_the_publishers_sampling_holds_where_the_user_says_nothing(dense):
    calm = loaded(DENSE, ServingSpec(sampling=SamplingSpec(do_sample=False)))
    assert calm.generate(PROMPT, TextOptions(max_tokens=16)).text == dense.generate(PROMPT, LIKELIEST).text
    narrow = loaded(DENSE, ServingSpec(sampling=SamplingSpec(do_sample=True, temperature=1.0, top_k=1)))
    text = narrow.generate(PROMPT, TextOptions(max_tokens=16)).text
    assert text == dense.generate(PROMPT, LIKELIEST).text
    assert narrow.generate(PROMPT, TextOptions(max_tokens=16, top_k=0, seed=1)).text != text


def test_the_context_ends_an_answer_and_refuses_a_longer_prompt(dense):
    answer = dense.generate([65] * (DENSE.context - 3), LIKELIEST)
    assert (answer.tokens, answer.finish) == (3, "length")
    with pytest.raises(ConfigError, match="the prompt has 48 tokens, and the model reads 48"):
        dense.generate([65] * DENSE.context, LIKELIEST)


def test_an_empty_prompt_begins_somewhere(dense):
    assert dense.tokens_of("") == [ord("\n")]
    assert dense.generate(dense.tokens_of(""), LIKELIEST).text


def test_mixtures_without_a_class_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="zero experts and a choice bias have no class in transformers"):
        loaded(replace(MIXED, experts=replace(EXPERTS, zero=2)))


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_the_template_of_a_run_makes_its_prompts():
    model = loaded(DENSE, ServingSpec(chat_template=TEMPLATE))
    assert model.has_template
    assert bytes(model.chat_tokens([{"role": "user", "content": "hi"}])) == b"<user>hi<a>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_or_wants_more_than_text_is_one_line(template):
    model = loaded(DENSE, ServingSpec(chat_template=template))
    with pytest.raises(ConfigError, match="the model's chat template failed"):
        model.chat_tokens([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "has no config.json; give a folder"),
        ("tokenizer.json", "{}", "cannot be loaded"),
        ("config.json", '{"model_type": "unheard"}', "cannot be loaded"),
        ("model.safetensors", "no weights", "cannot be loaded"),
    ],
)
def test_a_folder_that_is_none_is_one_line(tmp_path, name, content, said):
    folder = tmp_path / "out"
    save_folder(folder, DENSE, theta_of(DENSE).__getitem__, tokenizer_files(byte_tokenizer_json(), 48))
    (folder / name).write_text(content) if content else (folder / name).unlink()
    with pytest.raises(ConfigError) as caught:
        loading.load_model_folder(folder, "cpu")
    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    save_folder(tmp_path / "out", DENSE, theta_of(DENSE).__getitem__, tokenizer_files(byte_tokenizer_json(), 48))
    for device in ("cuda:9", "abacus"):
        with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
            loading.load_model_folder(tmp_path / "out", device)
