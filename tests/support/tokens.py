"""Tokenizers that are made on the spot, one of each kind that is in use."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.data.corpora import load_corpus

SIZE = 500
END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@functools.cache
def corpus():
    return load_corpus("python-docs").text


@functools.cache
def tokenizer(kind="gpt2"):
    """Returns a tokenizer of some 500 tokens: gpt2, llama, unigram or bert."""
    special = [END]
    if kind == "gpt2":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind == "llama":
        # Words are not split off before, and a space stands before every text.
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=["<unk>", *special], show_progress=False
        )
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=SIZE,
            special_tokens=["<unk>", *special],
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=SIZE, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        )
    lines = corpus()[:40_000].splitlines(keepends=True)
    made.train_from_iterator(lines, trainer)
    if kind == "bert":
        ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=ids
        )
    return made


def save_tokenizer(folder):
    """Saves a tokenizer of GPT-2's kind with a chat template, as Hugging Face does."""
    import transformers

    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END)
    made.chat_template = CHAT
    made.save_pretrained(folder)


def write_model_and_answers():
    """Writes a small Llama of Hugging Face, ``model``, and conversations, ``answers.jsonl``."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    save_tokenizer("model")
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "7"}]}
        for n in range(60)
    ]
    Path("answers.jsonl").write_text("\n".join(map(json.dumps, talks)))


def write_t5(folder):
    """Writes a small T5 of Hugging Face whose tokenizer ends every text, as T5's does."""
    import transformers

    from tests.support.hugging_face.building import randomize

    made = tokenizers.Tokenizer.from_str(tokenizer("unigram").to_str())
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, made.token_to_id(END))]
    )
    end = made.token_to_id(END)
    config = transformers.T5Config(
        vocab_size=SIZE, d_model=24, d_kv=10, num_heads=3, d_ff=44, num_layers=3,
        num_decoder_layers=2, n_positions=64, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=end,
    )  # fmt: skip
    model = randomize(transformers.T5ForConditionalGeneration(config), std=0.3).float()
    model.save_pretrained(folder)
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token="<unk>"
    )
    saved.save_pretrained(folder)
    return model, saved
