"""The embedded engine against one plain `model.generate` call: the same 32 prompts, arriving at random in a second.

    python bench/engine.py [--model DIR]
"""

import argparse
import asyncio
import random
import time
import copy
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dockyard.config import EngineConfig
from dockyard.engine import GenerateRequest
from dockyard.engine.transformers import TransformersEngine

NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 32, 100, 32

async def main():
    model = AutoModelForCausalLM.from_pretrained('/tmp/proto/model', dtype=torch.float32).eval()
    eng = TransformersEngine(copy.deepcopy(model), EngineConfig())
    rng = random.Random(0)
    prompts=[np.array([rng.randrange(1000,40000) for _ in range(100)],dtype=np.int32) for _ in range(32)]
    def plain():
        x=torch.tensor(np.stack(prompts)).long()
        t=time.perf_counter(); model.generate(x,attention_mask=torch.ones_like(x),max_new_tokens=32,min_new_tokens=32,do_sample=True,top_k=0,temperature=1.0); return time.perf_counter()-t
    async def ours(rep):
        async def one(i,p,d):
            await asyncio.sleep(d)
            g=await eng.generate(GenerateRequest(prompt_ids=p,max_new_tokens=32,temperature=1.0,stop_ids=frozenset(),seed=i+100*rep))
            return g
        t=time.perf_counter()
        gs=await asyncio.gather(*[one(i,p,rng.random()) for i,p in enumerate(prompts)])
        return time.perf_counter()-t, gs
    plain()
    for rep in range(3):
        a=plain(); 
        eng._prefixes.clear()
        b,gs=await ours(rep); print(f"plain {1024/a:.1f} tok/s  ours {1024/b:.1f} tok/s ratio {a/b:.2f}")
    # check logprobs
    g=gs[3]; seq=np.concatenate([prompts[3],g.token_ids])
    with torch.no_grad():
        lp=torch.log_softmax(model(torch.tensor(seq[None]).long()).logits.float(),-1)[0]
    ref=lp[99:-1].gather(1,torch.tensor(g.token_ids).long()[:,None])[:,0].numpy()
    print('max diff',np.abs(ref-g.logprobs).max(), g.finish)
    await eng.close()
asyncio.run(main())
