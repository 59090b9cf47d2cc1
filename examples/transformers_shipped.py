"""Cut a Transformers model, keep it by save_pretrained, and load it again. CPU, seconds; nothing is downloaded."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import espalier
from espalier.integrations.pretrained import from_pretrained

model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()
tokens = torch.randint(0, 60, (2, 8))
gated = espalier.attach(model, {"input_ids": tokens})
small = gated.compact((torch.rand(gated.d) < 0.5).float()).eval()
with tempfile.TemporaryDirectory() as folder:
    small.save_pretrained(folder)
    again = from_pretrained(folder)
with torch.no_grad():
    same = torch.equal(again(tokens).logits, small(tokens).logits)
sizes = [sum(p.numel() for p in net.parameters()) for net in (model, again)]
print(f"{sizes[1]:,} of {sizes[0]:,} parameters; loaded again, the outputs are {'equal' if same else 'different'}")
