"""Folders like those that people publish, made by `transformers` itself: a small model and a trained tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.later import transformers

torch.set_num_threads(1)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Llama 3 and Qwen cut words with."""
TEXT = "The cat, 1234 of them!\n\n  sat  on it's\tmat. Ä é 你好 🙂\r\n" * 40
CONTEXT = 48


def trained(pre, normalizer=None, alphabet=True, text=TEXT, vocab=400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, special_tokens=["<end>"], initial_alphabet=letters
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def qwen_like() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return trained(cut, normalizers.NFC())


def llama_like() -> Tokenizer:
    """Words begin with a sign for a space, as SentencePiece writes them."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(pre_tokenizers.Digits(individual_digits=True), normalizer, alphabet=False)


def size(tokenizer: Tokenizer) -> int:
    return tokenizer.get_vocab_size(with_added_tokens=True)


def publish(folder: Path, kind: Any = None, **changes) -> Any:
    """A model with wide heads and a padded vocabulary, in bfloat16 as most are; the saved model, in float32.

    `kind`: its configuration; None: Qwen3's.
    """
    tokenizer = qwen_like()
    torch.manual_seed(1)
    config = (kind or transformers.Qwen3Config)(
        **{
            "vocab_size": size(tokenizer) + 5, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": CONTEXT,
            "initializer_range": 0.2, "tie_word_embeddings": True, **changes,
        }
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def teach(folder: Path, steps: int = 60) -> float:
    """Train what `publish` wrote on TEXT, in place; the last loss, nats per token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids)
    windows = torch.stack([tokens[at : at + 33] for at in range(0, 32 * 16, 32)])
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        logits = model(input_ids=windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)
    return float(loss.detach())
