"""A reward model trained on K-wise rankings, then scored by plain transformers: nothing of this package is needed there.

python examples/reward_model_elsewhere.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.reward import RewardConfig, RewardTrainer

ANSWERS = ["It is Paris, on the Seine.", "Paris.", "Lyon, I think.", "No."]
QUESTION = "What is the capital of France? ({})"
RANKINGS = [{"prompt": QUESTION.format(n), "responses": ANSWERS, "ranks": [1, 1, 3, 4]} for n in range(8)]


def main(model_name: str = "tiny-llama", output_dir: str = "runs/examples/k-wise", epochs: int = 10) -> list[float]:
    """Train and return the rewards of the four answers, as plain transformers computes them."""
    config = RewardConfig(
        output_dir=output_dir, num_train_epochs=epochs, batch_size=4, learning_rate=1e-3, dtype="float32", report_to=["none"]
    )
    folder = RewardTrainer(model_name, RANKINGS, config, validation_data=RANKINGS[:2]).train()

    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards = []
    for answer in ANSWERS:
        messages = [
            {"role": "user", "content": QUESTION.format(0)},
            {"role": "assistant", "content": answer},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            rewards.append(float(classifier(ids).logits[0, 0]))
        print(f"{rewards[-1]:+.3f}  {answer}")
    print(f"the reward model is in {folder}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
