"""Fit a recipe to a model once and generate from a packed cache.

python examples/generate.py [MODEL [RECIPE]]
"""

import sys

import kvant
from kvant.models import load

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
recipe = sys.argv[2] if len(sys.argv) > 2 else "kvant-4-fast"  # kvant-2 has half the bits, and a fit that takes minutes

model, tokenizer = load(name)
artifact = kvant.artifact_for(model, tokenizer, recipe)  # kept in the cache directory: the second run finds it
cache = kvant.Cache(model, recipe, artifact=artifact)

messages = [{"role": "user", "content": "Name three primary colours."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(cache)
