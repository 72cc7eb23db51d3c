"""The flags that commands share, each with its default, its help and its EAGLE3_* variable; and what a command is here.

Ranges are not checked here: settings.py does, once for every caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..errors import OptionError
from ..prompt import clean
from ..settings import (
    CACHE_TYPES,
    DEVICES,
    FEEDBACK,
    FLASH_ATTENTION,
    GPU_NAMES,
    SPLIT_MODES,
    RuntimeSettings,
    SamplingSettings,
)

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

SAMPLING, RUNTIME = SamplingSettings(), RuntimeSettings()


class Text(click.ParamType):
    """UTF-8 text without NUL.  A variable for a repeatable option holds one value per line."""

    name = "text"
    envvar_list_splitter = "\n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return clean(str(value), param.opts[-1] if param else "text")


class EscapedText(Text):
    r"""Text in which \n, \t, \r and \\ stand for what they do in C, as in llama.cpp's options of this kind."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = super().convert(value, param, ctx).split("\\\\")
        for escape, meaning in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            parts = [part.replace(escape, meaning) for part in parts]
        return "\\".join(parts)


TEXT, ESCAPED = Text(), EscapedText()


class DraftTokens(click.ParamType):
    """A number of tokens, or auto, which is None."""

    name = "number"
    in_file = (int, str), 'a whole number or "auto"'  # types in the configuration file, and the words for them

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value == "auto" else click.INT.convert(value, param, ctx)


class Device(click.Choice[str]):
    """A kind of device, or the names of GPUs."""

    in_file = (str,), f"one of {', '.join(DEVICES)}, or names of GPUs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if GPU_NAMES.fullmatch(value) and value not in DEVICES else super().convert(value, param, ctx)


class Option(click.Option):
    """An option that belongs under a heading of the help page.

    shared   it means the same in every command that has it, so one variable and one line of the configuration file set
             it for all of them
    """

    def __init__(self, *args: Any, heading: str = "Options", shared: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading, self.shared = heading, shared

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Files, folders and registered models by what the help page calls the value."""
        from ..completion import of_value

        items = of_value(self.metavar or "", incomplete, names="--target" in self.opts)
        return items or super().shell_complete(ctx, incomplete)


class Command(click.Command):
    """A command whose help page has its options under headings, in the order of their declaration, and whose options
    have their defaults from the configuration file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first_level = ctx.parent is not None and ctx.parent.parent is None
        if first_level and ctx.default_map is None and not ctx.resilient_parsing:
            ctx.default_map = self.configured(ctx, args)
        return super().parse_args(ctx, args)

    def configured(self, ctx: click.Context, args: list[str]) -> dict[str, Any] | None:
        """What the configuration file sets.  A help page is shown whatever is in that file, and tells the defaults that
        are built in."""
        from ..config import config_file, defaults, settable

        path, help_option = config_file(), self.get_help_option(ctx)
        if path is None or not settable(self):
            return None
        given = self.make_parser(ctx).parse_args(list(args))[0]
        return None if help_option and help_option.name in given else defaults(path, ctx)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OptionError as error:
            name = re.split("[:, ]", error.message, maxsplit=1)[0]
            setter = set_by(ctx, lambda param: name in param.opts)
            if setter:
                error.hint = f"{setter} sets it. {error.hint or ''}".rstrip()
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                sections.setdefault(getattr(param, "heading", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def option(heading: str, *names: str, variable: bool | str = True, **attrs: Any) -> Decorator[Any]:
    """click.option with a heading and a variable: EAGLE3_NAME, which commands share; EAGLE3_TRAIN_NAME, by variable
    "TRAIN", for what means something else in each; none for what names this call's own input or output."""
    if variable:
        long = next(name for name in names if name.startswith("--"))
        prefix = "EAGLE3" if variable is True else f"EAGLE3_{variable}"
        attrs.update(envvar=f"{prefix}_{long[2:].replace('-', '_').upper()}", show_envvar=True)
    return click.option(*names, cls=Option, heading=heading, shared=variable is True, **attrs)


def set_by(ctx: click.Context, wanted: Callable[[click.Parameter], bool]) -> str | None:
    """What has set a parameter, other than the command line: a variable or the configuration file, by name; None where
    nothing has."""
    for param in filter(wanted, ctx.command.params):
        source = ctx.get_parameter_source(str(param.name))
        if source is ParameterSource.ENVIRONMENT:
            return str(param.envvar)
        if source is ParameterSource.DEFAULT_MAP:
            from ..config import config_file

            return str(config_file())
    return None


def together(*decorators: Decorator[Any]) -> Decorator[F]:
    """One decorator that applies several; the first listed comes first on the help page."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _default(heading: str, name: str, default: Any, help: str, *more: str) -> Decorator[Any]:
    return option(heading, name, *more, type=type(default), default=default, show_default=True, help=help)


MODEL = "Models"
pair_options: Decorator[Any] = together(
    option(MODEL, "--target", metavar="GGUF", help="The model that answers. Default: the demo pair."),
    option(MODEL, "--draft", metavar="GGUF|lookup",
           help="Its EAGLE-3 drafter, made by eagle3 convert; lookup: n-gram matches in the text alone."),
    option(MODEL, "--no-draft", is_flag=True, help="Answer without a drafter."),
    option(MODEL, "--lora", type=TEXT, multiple=True, metavar="GGUF", help="A LoRA adapter on the target; repeatable."),
    option(MODEL, "--lora-scaled", type=TEXT, multiple=True, metavar="GGUF:SCALE",
           help="The same, its effect times SCALE."),
)  # fmt: skip

DRAFTING = "Drafting"
feedback_option: Decorator[Any] = option(
    DRAFTING, "--feedback", type=click.Choice(FEEDBACK), default="auto", show_default=True,
    help="What a draft step hands on: its output before or after the final norm; auto: as the drafter says.",
)  # fmt: skip
draft_options: Decorator[Any] = together(
    option(
        DRAFTING,
        "--draft-tokens",
        type=DraftTokens(),
        metavar="auto|N",
        help="Tokens proposed per round; auto, the default: as many as pay, from none on.",
    ),
    option(DRAFTING, "--draft-depth", type=int, metavar="N", help="Most levels of the draft tree."),
    option(DRAFTING, "--draft-width", type=int, metavar="N", help="Most nodes expanded per level; 1 is a chain."),
    option(
        DRAFTING,
        "--no-lookup",
        is_flag=True,
        help="Leave n-gram matches of the text, which auto adds to the tree, out of it.",
    ),
    feedback_option,
)

RUN = "Running"
runtime_options: Decorator[Any] = together(
    _default(RUN, "--ctx-size", RUNTIME.ctx_size, "Tokens of context; 0: as trained, at most 8192.", "-c"),
    _default(RUN, "--batch-size", RUNTIME.batch, "Tokens of one prompt chunk.", "-b"),
    _default(RUN, "--threads", RUNTIME.threads, "CPU threads; 0: one per physical core.", "-t"),
    _default(RUN, "--draft-threads", RUNTIME.draft_threads, "CPU threads of the drafter; 0: as --threads."),
    option(RUN, "--gpu-layers", "-ngl", type=int, metavar="N",
           help="Layers of each model on the GPU; -1, the default, is all where there is one."),
    option(RUN, "--no-mmap", is_flag=True,
           help="Read the weights into memory of their own: on a CPU faster to decode with, slower to load."),
    option(RUN, "--device", "-dev", type=Device(DEVICES), default="auto", show_default=True,
           metavar="|".join((*DEVICES, "NAME,...")), help="Where to run; eagle3 doctor lists the names of GPUs."),
    option(RUN, "--split-mode", "-sm", type=click.Choice(SPLIT_MODES),
           help="How several GPUs share the models: not at all, by layers (the default), or by rows."),
    option(RUN, "--tensor-split", "-ts", metavar="N,N,...", help="Their shares; the default: by free memory."),
    option(RUN, "--main-gpu", "-mg", type=int, metavar="N", help="The GPU of --split-mode none or row, from 0."),
    option(RUN, "--override-tensor", "-ot", type=TEXT, multiple=True, metavar="REGEX=BUFFER",
           help="Memory for the target's tensors of these names, as CPU or CUDA0; repeatable, or with commas."),
    option(RUN, "--cpu-moe", "-cmoe", is_flag=True, help="Keep all experts of the target in the CPU's memory."),
    option(RUN, "--n-cpu-moe", "-ncmoe", type=int, metavar="N", help="Those of its first N layers."),
    option(RUN, "--flash-attn", "-fa", type=click.Choice(list(FLASH_ATTENTION)), default="auto", show_default=True,
           help="Flash attention of the target."),
    option(RUN, "--cache-type-k", "-ctk", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True,
           help="Type of the target's cached keys."),
    option(RUN, "--cache-type-v", "-ctv", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True,
           help="Type of the target's cached values."),
)  # fmt: skip

LIMITS = "The answer's end"
limit_options: Decorator[Any] = together(
    option(LIMITS, "-n", "--max-tokens", type=int, metavar="N", help="Most tokens; -1, the default: the context."),
    option(LIMITS, "--stop", type=ESCAPED, multiple=True, metavar="TEXT",
           help=r"End before this text; repeatable. \n and \t are understood."),
    option(LIMITS, "--ignore-eos", is_flag=True, help="Go on behind the end token."),
)  # fmt: skip

SAMPLE = "Sampling"
sampling_options: Decorator[Any] = together(
    _default(SAMPLE, "--temp", SAMPLING.temperature, "Temperature; 0 always takes the likeliest token."),
    _default(SAMPLE, "--top-k", SAMPLING.top_k, "Keep the N likeliest tokens; 0: all."),
    _default(SAMPLE, "--top-p", SAMPLING.top_p, "Keep the likeliest tokens up to this probability; 1: all."),
    _default(SAMPLE, "--min-p", SAMPLING.min_p, "Drop tokens below this share of the likeliest; 0: none."),
    _default(SAMPLE, "--typical", SAMPLING.typical_p, "Locally typical sampling; 1: off."),
    _default(SAMPLE, "--top-nsigma", SAMPLING.top_n_sigma, "Keep logits within N deviations of the best; -1: off.",
             "--top-n-sigma"),
    _default(SAMPLE, "--xtc-probability", SAMPLING.xtc_probability, "How often XTC drops the likeliest; 0: never."),
    _default(SAMPLE, "--xtc-threshold", SAMPLING.xtc_threshold, "XTC drops all above it but the last; over 0.5: off."),
    _default(SAMPLE, "--dynatemp-range", SAMPLING.dynatemp_range, "How far the temperature follows entropy; 0: not."),
    _default(SAMPLE, "--dynatemp-exp", SAMPLING.dynatemp_exponent, "Exponent of that."),
    _default(SAMPLE, "--mirostat", SAMPLING.mirostat, "Mirostat of version 1 or 2 instead of all others; 0: off."),
    _default(SAMPLE, "--mirostat-lr", SAMPLING.mirostat_lr, "Mirostat's learning rate, eta."),
    _default(SAMPLE, "--mirostat-ent", SAMPLING.mirostat_ent, "Mirostat's target entropy, tau."),
    _default(SAMPLE, "--adaptive-target", SAMPLING.adaptive_target,
             "Adaptive-p prefers tokens near this probability; below 0: off. Needs adaptive_p in --samplers."),
    _default(SAMPLE, "--adaptive-decay", SAMPLING.adaptive_decay, "How much adaptive-p remembers."),
    option(SAMPLE, "--samplers", type=TEXT, metavar="NAME;...", default=";".join(SAMPLING.samplers), show_default=True,
           help="Which samplers are applied, and in which order."),
    option(SAMPLE, "--seed", type=int, default=-1, show_default=True, help="Seed of the draws; -1: a new one."),
    _default(SAMPLE, "--repeat-penalty", SAMPLING.repeat_penalty, "Penalty on repeated tokens; 1: off."),
    _default(SAMPLE, "--repeat-last-n", SAMPLING.repeat_last_n, "Tokens the penalties look at; -1: the context."),
    _default(SAMPLE, "--presence-penalty", SAMPLING.presence_penalty, "Penalty on tokens seen; 0: off."),
    _default(SAMPLE, "--frequency-penalty", SAMPLING.frequency_penalty, "Penalty per time seen; 0: off."),
    _default(SAMPLE, "--dry-multiplier", SAMPLING.dry_multiplier, "Strength of the DRY penalty; 0: off."),
    _default(SAMPLE, "--dry-base", SAMPLING.dry_base, "DRY base."),
    _default(SAMPLE, "--dry-allowed-length", SAMPLING.dry_allowed_length, "Repeats up to this length are free."),
    _default(SAMPLE, "--dry-penalty-last-n", SAMPLING.dry_penalty_last_n, "Tokens DRY looks at; -1: the context."),
    option(SAMPLE, "--dry-sequence-breaker", type=ESCAPED, multiple=True, metavar="TEXT",
           help=r'Text that ends a repeat, instead of \n : " *; repeatable, "none" for none.'),
    option(SAMPLE, "--logit-bias", multiple=True, metavar="ID(+/-)BIAS",
           help="Make a token likelier or less likely: 15043+1, 15043-1, 15043-inf; repeatable."),
)  # fmt: skip

FORM = "The answer's form (one of these)"
form_options: Decorator[Any] = together(
    option(FORM, "--grammar", type=TEXT, metavar="GBNF", help="Only text of this grammar."),
    option(FORM, "--grammar-file", metavar="FILE", help="The same, from a file."),
    option(FORM, "--json-schema", type=TEXT, metavar="SCHEMA", help="Only JSON of this schema, or of @FILE."),
    option(FORM, "--json-schema-file", metavar="FILE", help="The same, from a file."),
)

raw_output_option: Decorator[Any] = option(
    "Options", "--raw-output", is_flag=True,
    help=r"Send control characters of the answer to a terminal; else they are shown (\u001b).",
)  # fmt: skip
template_option: Decorator[Any] = option(
    "Options", "--chat-template-kwargs", type=TEXT, metavar="JSON",
    help="""Further variables of the chat template, as '{"enable_thinking": false}'.""",
)  # fmt: skip
answer_options: Decorator[Any] = together(
    raw_output_option, template_option, pair_options, draft_options, limit_options, sampling_options, form_options,
    runtime_options,
)  # fmt: skip
system_option: Decorator[Any] = option("Options", "--system", type=TEXT, metavar="TEXT", help="System message.")
hide_thinking_option: Decorator[Any] = option(
    "Options", "--hide-thinking", is_flag=True,
    help="Leave out what a reasoning model thinks before it answers, which else goes to stderr.",
)  # fmt: skip
quiet_option: Decorator[Any] = option(
    "Options", "-q", "--quiet", is_flag=True, help="No progress and no notes on stderr."
)
