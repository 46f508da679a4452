"""The objects that a script gives the trainer: what is changed in them, and which of them may share weights."""

from transformers import AutoTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_tokenizer_keeps_its_chat_templates_in_memory_and_in_every_folder(make_trainer, tokenizer, tmp_path):
    templates = {"default": CHATML, "tool_use": "{{ messages }}"}
    tokenizer.chat_template = dict(templates)
    trainer = make_trainer({"save_steps": 1, "total_episodes": 4})
    trainer.train()
    trainer.save_model()
    assert trainer.processing_class is trainer.callback_handler.processing_class is tokenizer
    assert tokenizer.chat_template == templates
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == templates


def test_a_tokenizer_without_a_chat_template_gets_none(make_trainer, tokenizer, tmp_path):
    tokenizer.chat_template = None
    make_trainer().save_model()
    assert tokenizer.chat_template is None
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None
