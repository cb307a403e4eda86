"""Greedy decode speed at batch 1, beside Hugging Face transformers, in one run on one machine.

    python -m tests.bench.bench_transformers --gguf=PATH/MODEL.gguf --python=VENV/bin/python [--context=512] [--steps=128]

`--python` is an interpreter with torch, transformers and gguf. Both sides are loaded first and then take turns, round by round;
while one runs the other waits. transformers runs its default for a GGUF file (weights left packed), and dense float32 and
bfloat16; the best of the three is what moejax is compared with. Times are of one token: for transformers one forward pass and
argmax with the cache, for moejax the engine's steps. Ratios are of medians; p5 says what a machine that is busy with other
things hides. The last line is one JSON object.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--python", help="interpreter with torch and transformers")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache before the first timed step")
    parser.add_argument("--steps", type=int, default=128, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4], help="cache widths of moejax")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
    else:
        compare(args)


def compare(args) -> None:
    other = subprocess.Popen(
        [args.python, __file__, "--serve", f"--gguf={args.gguf}", f"--context={args.context}", f"--steps={args.steps}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) if args.python else None
    variants = json.loads(other.stdout.readline()) if other else []
    engines, prompt, load_s = load_engines(args)
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for bits, engine in engines.items():
            times.setdefault(f"moejax_kv{bits}", []).extend(run_engine(engine, prompt, args.steps))
        for variant in variants:
            other.stdin.write(variant + "\n")
            other.stdin.flush()
            times.setdefault(f"transformers_{variant}", []).extend(json.loads(other.stdout.readline()))
    if other:
        other.stdin.close()
        other.wait()
    result = {f"{name}_ms_p50": statistics.median(t) for name, t in times.items()}
    result |= {f"{name}_ms_p{q}": sorted(t)[int(len(t) * q / 100)] for name, t in times.items() for q in (5, 99)}
    for name, value in sorted(result.items()):
        print(f"{name:40} {value:8.2f}")
    best = min((v for k, v in result.items() if k.startswith("transformers") and k.endswith("p50")), default=None)
    first = result[f"moejax_kv{args.bits[0]}_ms_p50"]
    if best is not None:
        result["ratio_to_best_transformers"] = first / best
    for bits in args.bits[1:]:
        result[f"ratio_kv{bits}_to_kv{args.bits[0]}"] = result[f"moejax_kv{bits}_ms_p50"] / first
    print(json.dumps({"context": args.context, "steps": args.steps, "rounds": args.rounds, "load_s": load_s, **result}))


def load_engines(args):
    """(bits -> compiled engine, prompt, seconds to load the model)."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from moejax import checkpoint, compilation_cache
    from moejax.engine import Engine
    from pallas_kernels.kv_format import KVFormat

    start = time.perf_counter()
    compilation_cache.enable()
    model, tokenizer = checkpoint.load(args.gguf)
    load_s = time.perf_counter() - start
    prompt = token_ids(args.context)
    engines = {bits: Engine(model, tokenizer, kv_format=KVFormat(k_bits=bits, v_bits=bits), max_batch=1,
                            max_len=args.context + args.steps + 1) for bits in args.bits}
    for bits, engine in engines.items():
        start = time.perf_counter()
        run_engine(engine, prompt, 2)
        print(f"kv{bits}: compiled and ran in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return engines, prompt, load_s


def run_engine(engine, prompt: list[int], steps: int) -> list[float]:
    """Milliseconds of each decode step after the prompt."""
    from moejax.sampling import SamplingParams

    engine.stats.step_ms.clear()
    engine.generate([prompt], SamplingParams(max_tokens=steps + 1, ignore_eos=True))
    return engine.stats.step_ms


def token_ids(count: int) -> list[int]:
    """The same arbitrary ids on both sides."""
    return [(7919 * i * i + 104729 * i) % 40000 + 100 for i in range(count)]


def serve(args) -> None:
    """The transformers side: prints the names of its variants, then one line of times for each name it reads."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    def load(dtype, **kwargs):
        return AutoModelForCausalLM.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name, dtype=dtype, **kwargs).eval()

    def prefill(model):
        output = model(torch.tensor([token_ids(args.context)]), use_cache=True)
        return output.past_key_values, output.logits[:, -1:].argmax(-1)

    with torch.inference_mode():
        models = {"packed": load(torch.float32),
                  "float32": load(torch.float32, quantization_config=GgufConfig(dequantize=True)),
                  "bfloat16": load(torch.bfloat16, quantization_config=GgufConfig(dequantize=True))}
        states = {name: prefill(model) for name, model in models.items()}
        print(json.dumps(list(models)), flush=True)
        for line in sys.stdin:
            model, (cache, token) = models[line.strip()], states[line.strip()]
            times = []
            for _ in range(args.steps):
                start = time.perf_counter()
                output = model(token, past_key_values=cache, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
                token.item()
                times.append(1e3 * (time.perf_counter() - start))
            cache.crop(-args.steps)
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
