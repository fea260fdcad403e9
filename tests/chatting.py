"""Tokenizers with chat templates, for tests: 260 byte tokens and the special tokens of a template."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (  # no special token ends an answer, and contents are stripped
    "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
THINKING = (  # reasoning of earlier answers is left out, that of the last is rendered apart, as Qwen3 does it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1] | trim %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] | trim if '</think>' in m.content else '' }}"
    "\n</think>\n\n{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def make_tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level tokenizer of 262 tokens; <|im_start|> is 260 and <|im_end|> 261."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = template
    return found


def says(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """Messages in turn, of the user first unless told otherwise."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
