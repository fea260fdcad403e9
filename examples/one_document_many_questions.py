"""Many questions about one long document, answered as one batch: the document is read once and stored once.

python examples/one_document_many_questions.py [MODEL]
"""

import sys

import torch

import kvant
from kvant.models import load
from kvant.passages import conversation

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
cache = kvant.Cache(model, "int8", share=True)

document = "\n\n".join(turn["content"] for turn in conversation())[:2400]  # any text of yours
questions = ["What is this text about?", "Who speaks in it?", "Which number is in it?", "Give it a title."]

# 1. Read the document once. Its pages stay when the sequence has ended.
start = tokenizer(f"{document}\n\nQuestion:", return_tensors="pt")["input_ids"]
cache.generate(model, start, max_new_tokens=1)
cache.reset()

# 2. All questions as one batch, padded on the left. Every row finds the document's pages.
tokenizer.padding_side = "left"
batch = tokenizer([f"{document}\n\nQuestion: {q}\nAnswer:" for q in questions], return_tensors="pt", padding=True)
with torch.no_grad():
    output = cache.generate(model, batch["input_ids"], batch["attention_mask"], max_new_tokens=12, do_sample=False)

print(f"{batch['input_ids'].shape[1]} tokens a row, {cache.reused} of them not computed again; {cache}")
for question, row in zip(questions, output, strict=True):
    print(f"{question} {tokenizer.decode(row[batch['input_ids'].shape[1] :], skip_special_tokens=True).strip()!r}")
