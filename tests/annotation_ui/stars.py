"""A kind of labeling that the app does not have: all that a new one needs in Python and in JavaScript."""

from collections.abc import Sequence
from statistics import median_low

from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks import TASKS
from annotation_ui.tasks.base import Json, Setting, Task, Value, require
from annotation_ui.tasks.fields import prompt_field, prompt_view, text_field


class Stars(Task):
    """One star or more for a response, up to the setting `most`."""

    name = "stars"
    title = "Give stars"
    comparable = True
    settings = (Setting("most", int, "Most stars", "how many stars can be given"),)
    records = {"stars": list}  # noqa: RUF012

    def contents(self, row, settings, rules):
        return [{"prompt": prompt_field(row), "response": text_field(row, "response"), "most": settings.get("most", 5)}]

    def known_answers(self, gold, contents):
        return [self.check(gold, contents[0], [])]

    def view(self, content, order, settings, rules):
        response = text_view(content["response"])
        return {"prompt": prompt_view(content["prompt"]), "response": response, "most": content["most"]}

    def check(self, answer, content, rules):
        require(answer.get("stars") in range(1, content["most"] + 1), f"stars: must be 1 to {content['most']}")
        return {"stars": answer["stars"]}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return f"{answer['stars']} stars"

    def gold_agreement(self, answer, gold):
        return float(answer["stars"] == gold["stars"])

    def rows(self, content, answer):
        return [{"prompt": content["prompt"], "response": content["response"], "stars": answer["stars"]}]

    def combine(self, answers):
        return {"stars": median_low(answer["stars"] for answer in answers)}

    def values(self, answer):
        return [Value("stars", "ordinal", None, answer["stars"])]

    def questions(self, answer):
        return {"stars": str(answer["stars"])}


def register() -> None:
    """Add the task to the registry of this process."""
    TASKS["stars"] = Stars()


MODULE = """
import { conversation, h, radioGroup, written } from "../dom.js";
export const help = () => [["1 - 5", "give so many stars"]];
export const empty = () => ({ stars: null });
export const missing = (state) => (state.stars ? null : "Give it stars");
export function mount(root, view, context) {
  let { state } = context;
  const marks = Array.from({ length: view.most }, (_, at) => [at + 1, "★".repeat(at + 1)]);
  const buttons = radioGroup({ "aria-label": "Stars" }, marks, give);
  root.append(conversation(view.prompt), written(view.response), buttons.element);
  root.tabIndex = -1;
  function give(stars) {
    context.changed((state = { stars }));
    buttons.show(stars);
  }
  buttons.show(state.stars);
  return {
    focus: () => root.focus({ preventScroll: true }),
    restore: (next) => buttons.show((state = next).stars),
    key: ({ key }) => Number(key) >= 1 && Number(key) <= view.most && (give(Number(key)), true),
  };
}
"""
"""static/tasks/stars.js"""
