"""The models of torch_models as plain functions, in each of the layouts that people write."""

import jax
import jax.numpy as jnp
import numpy as np

# What a port of each model may choose; the first is the plainest.
GPT_OPTIONS = {
    "qkv": ("fused", "split", "heads"),
    "kernels": ("in_out", "out_in"),
    "batch": ("batched", "folded", "mapped"),
    "layers": ("loop", "scan", "remat"),
    "head": ("tied", "copied", "padded"),
    "mask": ("where", "added", "given", "weights"),
    "stored": ("float32", "bfloat16"),
    "inputs": ("list", "dict"),
}
LLAMA_OPTIONS = {
    "groups": ("repeated", "grouped"),
    "gate": ("split", "fused"),
    "rotary": ("computed", "table", "rotate_half", "complex"),
    "heads": ("first", "last"),
    "layers": ("scan", "loop", "jit"),
    "keys": ("new", "in_cache"),
}
VIT_OPTIONS = {
    "images": ("NHWC", "NCHW"),
    "patches": ("convolution", "product"),
    "batch": ("batched", "mapped"),
    "norm": ("grouped", "one_product"),
    "attention": ("einsum", "jax.nn"),
}


def layer_norm(x, scale, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * scale + bias


def gpt(arrays, heads=4, **options):
    """Returns the function and its parameters; ids is its one input."""
    o = {name: choices[0] for name, choices in GPT_OPTIONS.items()} | options
    turned = o["kernels"] == "out_in"

    def dense(name):
        kernel = arrays[f"{name}.weight"]
        return {"w": kernel if turned else kernel.T, "b": arrays[f"{name}.bias"]}

    def block(i):
        at = f"h.{i}"
        found = {n: dense(f"{at}.{n}") for n in ("proj", "fc", "out")}
        for n in ("ln_1", "ln_2"):
            found[n] = {"g": arrays[f"{at}.{n}.weight"], "b": arrays[f"{at}.{n}.bias"]}
        kernel, bias = arrays[f"{at}.qkv.weight"].T, arrays[f"{at}.qkv.bias"]
        if o["qkv"] == "fused":
            return found | {"qkv": (kernel, bias)}
        kernels, biases = np.split(kernel, 3, 1), np.split(bias, 3)
        if o["qkv"] == "heads":
            kernels = [k.reshape(len(k), heads, -1) for k in kernels]
            biases = [b.reshape(heads, -1) for b in biases]
        return found | {"q": (kernels[0], biases[0]), "k": (kernels[1], biases[1]),
                        "v": (kernels[2], biases[2])}  # fmt: skip

    blocks = [block(i) for i in range(3)]
    params = {
        "blocks": blocks,
        "wte": arrays["wte.weight"],
        "wpe": arrays["wpe.weight"],
        "ln_f": {"g": arrays["ln_f.weight"], "b": arrays["ln_f.bias"]},
    }
    if o["layers"] == "scan":
        params["blocks"] = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    if o["head"] == "copied":
        params["lm_head"] = arrays["wte.weight"].T
    if o["head"] == "padded":
        params["wte"] = np.pad(arrays["wte.weight"], ((0, 3), (0, 0)))
    if o["stored"] == "bfloat16":
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)

    def linear(p, x):
        return x @ (p["w"].T if turned else p["w"]) + p["b"]

    def project(p, x):
        width = x.shape[-1]
        if o["qkv"] == "fused":
            parts = jnp.split(x @ p["qkv"][0] + p["qkv"][1], 3, -1)
        elif o["qkv"] == "split":
            parts = [x @ p[n][0] + p[n][1] for n in "qkv"]
        else:
            return [jnp.einsum("...d,dnh->...nh", x, p[n][0]) + p[n][1] for n in "qkv"]
        return [part.reshape(*x.shape[:-1], heads, width // heads) for part in parts]

    def attend(q, k, v, mask):
        scores = jnp.einsum("...qnh,...knh->...nqk", q, k) / q.shape[-1] ** 0.5
        if o["mask"] in ("added", "given"):
            scores = scores + mask
        elif o["mask"] == "where":
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        raised = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        if o["mask"] == "weights":
            raised = jnp.where(mask, raised, 0)
        weights = raised / raised.sum(-1, keepdims=True)
        return jnp.einsum("...nqk,...knh->...qnh", weights, v)

    def run_block(x, p, length, mask):
        y = layer_norm(x, p["ln_1"]["g"], p["ln_1"]["b"])
        q, k, v = project(p, y)
        if o["batch"] == "folded":
            q, k, v = (part.reshape(-1, length, *part.shape[1:]) for part in (q, k, v))
        y = attend(q, k, v, mask).reshape(x.shape)
        x = x + linear(p["proj"], y)
        y = layer_norm(x, p["ln_2"]["g"], p["ln_2"]["b"])
        y = jax.nn.gelu(linear(p["fc"], y), approximate=False)
        return x + linear(p["out"], y)

    def forward(params, ids, bias=None):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        length = ids.shape[-1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        if o["mask"] == "added":
            mask = jnp.where(mask, 0.0, -1e9)
        elif bias is not None:
            mask = bias
        x = params["wte"][ids] + params["wpe"][:length]
        if o["batch"] == "folded":
            x = x.reshape(-1, x.shape[-1])
        if o["layers"] == "scan":
            x, _ = jax.lax.scan(
                lambda x, p: (run_block(x, p, length, mask), None), x, params["blocks"]
            )
        else:
            run = run_block
            if o["layers"] == "remat":
                run = jax.checkpoint(run_block, static_argnums=2)
            for p in params["blocks"]:
                x = run(x, p, length, mask)
        x = layer_norm(x, params["ln_f"]["g"], params["ln_f"]["b"])
        logits = x @ (params["lm_head"] if o["head"] == "copied" else params["wte"].T)
        logits = logits[..., :61] if o["head"] == "padded" else logits
        return logits.reshape(*ids.shape, -1)

    function = forward
    if o["batch"] == "mapped":
        function = lambda p, ids, **more: jax.vmap(  # noqa: E731
            lambda row: forward(p, row, **more)
        )(ids)
    return function, params


def gpt_inputs(ids, options):
    """Returns the inputs of ``gpt`` with these options."""
    length = ids.shape[1]
    bias = np.where(np.tril(np.ones((length, length), bool)), 0, -np.inf).astype(np.float32)
    given = {"bias": bias} if options.get("mask") == "given" else {}
    return {"ids": ids, **given} if given or options.get("inputs") == "dict" else [ids]


def llama(arrays, **options):
    """Returns the function and its parameters; ids is its one input."""
    o = {name: choices[0] for name, choices in LLAMA_OPTIONS.items()} | options
    kernels = {"q": (20, 4, 6), "k": (20, 2, 6), "v": (20, 2, 6)}

    def layer_params(i):
        at = f"layers.{i}"
        get = lambda name: arrays[f"{at}.{name}.weight"].T  # noqa: E731
        found = {n: get(n) for n in ("input_norm", "post_norm", "down")} | {"o": get("o_proj")}
        found |= {n: get(f"{n}_proj").reshape(shape) for n, shape in kernels.items()}
        if o["gate"] == "fused":
            return found | {"gate_up": np.concatenate([get("gate"), get("up")], 1)}
        return found | {n: get(n) for n in ("gate", "up")}

    layers = [layer_params(i) for i in range(2)]
    params = {
        "embed": arrays["embed.weight"],
        "norm": arrays["norm.weight"],
        "head": arrays["lm_head.weight"].T,
        "layers": layers,
    }
    if o["layers"] == "scan":
        params["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    inverse = 10000.0 ** (-np.arange(0, 6, 2) / 6)
    table = np.asarray(np.arange(16)[:, None] * inverse, np.float32)
    tables = np.cos(table), np.sin(table)

    def norm(x, weight):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight

    def rotary(x):
        length = x.shape[1] if o["heads"] == "last" else x.shape[2]
        angles = jnp.arange(length)[:, None] * jnp.asarray(inverse)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if o["rotary"] == "table":
            cos, sin = (jnp.asarray(part[:length]) for part in tables)
        if o["heads"] == "last":
            cos, sin = cos[:, None], sin[:, None]
        one, two = jnp.split(x, 2, -1)
        if o["rotary"] == "rotate_half":
            cos, sin = (jnp.concatenate([part, part], -1) for part in (cos, sin))
            return x * cos + jnp.concatenate([-two, one], -1) * sin
        if o["rotary"] == "complex":
            turned = (one + 1j * two) * (cos + 1j * sin)
            return jnp.concatenate([turned.real, turned.imag], -1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def attend(q, k, v):
        """Attends with heads first, (B, H, T, D)."""
        if o["keys"] == "in_cache":
            cache = jnp.zeros((2, *k.shape[:2], 16, 6), k.dtype)
            cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, 0, 0, 0))
            k, v = cache
        query, key = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
        seen = (key <= query) & (key > query - 5)
        if o["groups"] == "grouped":
            q = q.reshape(q.shape[0], 2, 2, *q.shape[2:])
            scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k) * 6**-0.5
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
            y = jnp.einsum("bkgqs,bksd->bkgqd", weights, v)
            return y.reshape(y.shape[0], 4, *y.shape[3:])
        k, v = (jnp.repeat(part, 2, 1) for part in (k, v))
        scores = (q * 6**-0.5) @ k.swapaxes(2, 3)
        return jax.nn.softmax(jnp.where(seen, scores, -1e10)) @ v

    def layer(x, p):
        y = norm(x, p["input_norm"])
        form = "btc,chd->bthd" if o["heads"] == "last" else "btc,chd->bhtd"
        q, k, v = (jnp.einsum(form, y, p[n]) for n in "qkv")
        q, k = rotary(q), rotary(k)
        if o["heads"] == "last":
            q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))
        y = attend(q, k, v).swapaxes(1, 2)
        x = x + y.reshape(*x.shape[:2], -1) @ p["o"]
        y = norm(x, p["post_norm"])
        if o["gate"] == "fused":
            gate, up = jnp.split(y @ p["gate_up"], 2, -1)
        else:
            gate, up = y @ p["gate"], y @ p["up"]
        return x + (jax.nn.silu(gate) * up) @ p["down"], None

    def forward(params, ids):
        x = params["embed"][ids]
        if o["layers"] == "scan":
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            run = jax.jit(layer) if o["layers"] == "jit" else layer
            for p in params["layers"]:
                x, _ = run(x, p)
        return norm(x, params["norm"]) @ params["head"]

    return forward, params


def vit(arrays, **options):
    """Returns the function and its parameters; images is its one input, (B, H, W, C)."""
    o = {name: choices[0] for name, choices in VIT_OPTIONS.items()} | options
    params = dict(arrays)
    if o["images"] == "NHWC":
        for name in ("stem", "patches"):
            params[f"{name}.weight"] = arrays[f"{name}.weight"].transpose(2, 3, 1, 0)
    if o["patches"] == "product":
        params["patches.weight"] = (
            arrays["patches.weight"].transpose(2, 3, 1, 0).reshape(-1, 18)
        )  # fmt: skip
    letters = ("NHWC", "HWIO", "NHWC") if o["images"] == "NHWC" else ("NCHW", "OIHW", "NCHW")

    def convolve(p, name, x, stride, padding):
        y = jax.lax.conv_general_dilated(
            x, p[f"{name}.weight"], (stride, stride), padding, dimension_numbers=letters
        )
        bias = p[f"{name}.bias"]
        return y + (bias if o["images"] == "NHWC" else bias[:, None, None])

    def stem(p, images):
        """Gives channels last."""
        if o["images"] == "NCHW":
            images = images.transpose(0, 3, 1, 2)
        x = convolve(p, "stem", images, 1, "SAME")
        x = x if o["images"] == "NHWC" else x.transpose(0, 2, 3, 1)
        y = x.reshape(*x.shape[:3], 2, 5)
        mean = y.mean((1, 2, 4), keepdims=True)
        variance = jnp.square(y - mean).mean((1, 2, 4), keepdims=True)
        scale, bias = p["stem_norm.weight"], p["stem_norm.bias"]
        if o["norm"] == "one_product":
            factor = jax.lax.rsqrt(variance + 1e-5) * scale.reshape(2, 5)
            y = y * factor + (bias.reshape(2, 5) - mean * factor)
            return jnp.maximum(y.reshape(x.shape), 0)
        y = (y - mean) / jnp.sqrt(variance + 1e-5)
        return jax.nn.relu(y.reshape(x.shape) * scale + bias)

    def patches(p, x):
        batch, height, width, channels = x.shape
        if o["patches"] == "product":
            x = x.reshape(batch, height // 4, 4, width // 4, 4, channels)
            x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, 16 * channels)
            return x @ p["patches.weight"] + p["patches.bias"]
        x = x if o["images"] == "NHWC" else x.transpose(0, 3, 1, 2)
        x = convolve(p, "patches", x, 4, "VALID")
        if o["images"] == "NCHW":
            return x.reshape(batch, 18, -1).transpose(0, 2, 1)
        return x.reshape(batch, -1, 18)

    def linear(p, name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def layer(p, at, x):
        y = layer_norm(x, p[f"{at}.norm_1.weight"], p[f"{at}.norm_1.bias"], 1e-6)
        qkv = linear(p, f"{at}.qkv", y).reshape(*x.shape[:2], 3, 3, 6)
        q, k, v = (qkv[:, :, i] for i in range(3))
        if o["attention"] == "jax.nn":
            y = jax.nn.dot_product_attention(q, k, v)
        else:
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 6**0.5)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + p[f"{at}.scale_1"] * linear(p, f"{at}.proj", y.reshape(x.shape))
        y = layer_norm(x, p[f"{at}.norm_2.weight"], p[f"{at}.norm_2.bias"], 1e-6)
        y = linear(p, f"{at}.fc_1", y)
        y = linear(p, f"{at}.fc_2", y / (1 + jnp.exp(-1.702 * y)))
        return x + p[f"{at}.scale_2"] * y

    def forward(p, images):
        x = patches(p, stem(p, images))
        token = jnp.broadcast_to(p["token"], (len(x), 1, 18))
        x = jnp.concatenate([token, x], 1) + p["positions"]
        for i in range(2):
            x = layer(p, f"layers.{i}", x)
        return linear(p, "head", layer_norm(x[:, 0], p["norm.weight"], p["norm.bias"], 1e-6))

    if o["batch"] == "mapped":
        one = lambda p, image: forward(p, image[None])[0]  # noqa: E731
        return jax.vmap(one, (None, 0)), params
    return forward, params
