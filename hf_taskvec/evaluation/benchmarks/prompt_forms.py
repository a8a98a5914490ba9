"""How a question is put to a model: between tags, as base models are asked, or by the tokenizer's chat template.

Probabilities and answers hang on it, so a report says which one was used, and two forms are never compared. A model is
asked as it was fine-tuned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_taskvec.errors import BadValueError, MissingNameError, did_you_mean


@dataclass(frozen=True)
class PromptForm:
    r"""The text around questions and answers.

    Args:
        name (`str`):
            What reports call it.
        question_start, question_end (`str`, *optional*):
            Before and after the question.
        answer_start, answer_end (`str`, *optional*):
            Before an answer, and after that of an in-context example.
        chat (`bool`, *optional*, defaults to `False`):
            Use the tokenizer's chat template instead of the tags.
        system (`str`, *optional*):
            The system's message of a chat; none if it is empty.
        date (`str`, *optional*):
            The date that templates such as Llama-3's put into it, which would change a result from day to day.

    Example:
        >>> PROMPT_FORMS["question"].text("Who wrote it?", [("Where?", "Here.")])
        'Question: Where?\nAnswer: Here.\n\nQuestion: Who wrote it?\nAnswer: '

    """

    name: str
    question_start: str = ""
    question_end: str = ""
    answer_start: str = ""
    answer_end: str = ""
    chat: bool = False
    system: str = ""
    date: str = ""

    def text(self, question: str, examples: Sequence[tuple[str, str]] = (), tokenizer: Any = None) -> str:
        """The prompt that an answer follows.

        Args:
            question (`str`):
                What is asked.
            examples (`Sequence[tuple[str, str]]`, *optional*):
                In-context questions and answers, before it.
            tokenizer (*optional*):
                Needed by a chat.

        Raises:
            `BadValueError`: If this is a chat, and the tokenizer has no template that takes it.
        """
        if self.chat:
            return self._chat(question, examples, tokenizer)
        shots = (
            f"{self.question_start}{q}{self.question_end}{self.answer_start}{a}{self.answer_end}" for q, a in examples
        )
        return "".join(shots) + f"{self.question_start}{question}{self.question_end}{self.answer_start}"

    def _chat(self, question: str, examples: Sequence[tuple[str, str]], tokenizer: Any) -> str:
        if tokenizer is None or tokenizer.chat_template is None:
            raise BadValueError(
                f"the prompt form {self.name!r} needs a chat template, which this tokenizer lacks: set "
                "tokenizer.chat_template, or load the benchmark with prompt='question'"
            )
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in examples:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question})
        dated = {"date_string": self.date} if self.date else {}
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **dated))
        except TemplateError as error:
            raise BadValueError(
                f"the tokenizer's chat template refuses the prompt form {self.name!r}: {error}. If it takes no system "
                "message, give PromptForm('chat', chat=True)"
            ) from error
        # The template writes the token that begins a text, and the tokenizer would put another one before it.
        begin = tokenizer.bos_token
        if begin and text.startswith(begin) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
            text = text.removeprefix(begin)
        return text


#: `question`: MUSE, and TOFU's Phi and Pythia; `llama-2-chat`: TOFU's Llama-2; `chat`: open-unlearning's Llama-3.2
PROMPT_FORMS = {
    form.name: form
    for form in (
        PromptForm("question", "Question: ", "\n", "Answer: ", "\n\n"),
        PromptForm("llama-2-chat", "[INST] ", " [/INST]", "", " "),
        PromptForm("chat", chat=True, system="You are a helpful assistant.", date="10 Apr 2025"),
    )
}


def prompt_form(form: str | PromptForm) -> PromptForm:
    """The form of that name, or the one that is given.

    Raises:
        `MissingNameError`: If there is none of that name.
    """
    if isinstance(form, PromptForm):
        return form
    if form not in PROMPT_FORMS:
        raise MissingNameError(
            f"no prompt form {form!r}.{did_you_mean(form, PROMPT_FORMS)} The forms are {', '.join(PROMPT_FORMS)}; "
            "another one is a `PromptForm(...)` of your own"
        )
    return PROMPT_FORMS[form]
