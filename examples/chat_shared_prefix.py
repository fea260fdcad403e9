"""Two chats that begin with the same system prompt: its pages are stored, and its tokens computed, once.

python examples/chat_shared_prefix.py [MODEL]
"""

import sys

import kvant
from kvant.models import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
cache = kvant.Cache(model, "int8", share=True)  # pages of finished chats stay, and are found by their tokens

SYSTEM = "You are a guide in a small museum of clocks. " + "Answer in one short sentence, politely and truthfully. " * 8


def ask(chat: list[dict[str, str]], question: str) -> None:
    chat.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = inputs["input_ids"]
    output = cache.generate(model, ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
    chat.append({"role": "assistant", "content": answer})
    print(f"{ids.shape[1]} tokens, {cache.reused} of them not computed again: {answer!r}")


first = [{"role": "system", "content": SYSTEM}]
second = [{"role": "system", "content": SYSTEM}]
ask(first, "When does the museum open?")  # nothing is stored yet
ask(first, "And on Sundays?")  # goes on from the first answer
ask(second, "Who made the oldest clock?")  # another visitor: the system prompt's pages are found
