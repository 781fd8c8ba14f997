"""What is public in Python: every name that the reference describes, by page and section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Names that belong together.

    :param names: in the order of the page, as users import them.
    :param text: a paragraph before them.
    """

    title: str
    names: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class PythonPage:
    """A page of the Python reference.

    :param name: of its file, without an ending.
    :param text: reStructuredText below the title.
    """

    name: str
    title: str
    text: str
    sections: tuple[Section, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that the page describes."""
        return tuple(name for section in self.sections for name in section.names)


def _of(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names.split())


def _memory(names: str) -> tuple[str, ...]:
    return _of("kvell.memory", names)


PAGES = (
    PythonPage(
        "llm",
        "LLM: a model in this process",
        "Loads a model and answers prompts, without a server and without further processes.",
        (
            Section("The class", ("kvell.LLM",)),
            Section(
                "What it takes and returns",
                (
                    "kvell.llm.Prompt",
                    "kvell.local.jobs.Sampling",
                    "kvell.local.runs.UseTqdm",
                    "kvell.RequestOutput",
                    "kvell.CompletionOutput",
                    "kvell.local.outputs.Logprob",
                    "kvell.local.outputs.RequestMetrics",
                    "kvell.local.requests.Priority",
                    *_of("kvell.local.metrics", "Metric Counter Gauge Vector"),
                    *_of("kvell", "EmbeddingOutput ScoringOutput PoolingParams"),
                    *_of("kvell", "TextPrompt TokensPrompt"),
                    "kvell.BeamSearchParams",
                    "kvell.engine.requests.beam_search.EarlyStopping",
                    *_of("kvell.local.jobs", "BeamSearchOutput BeamSequence"),
                ),
            ),
            Section(
                "As in vLLM: arguments as an object, and steps that the caller runs",
                (
                    *_of("kvell", "EngineArgs LLMEngine"),
                    "kvell.engine.arg_utils.FlexibleArgumentParser",
                ),
            ),
            Section(
                "What it is made of",
                (
                    *_of("kvell.engine.setup.contract", "MemoryContract GroupContract ModelShare"),
                    *_of("kvell.models.text.tokenizer", "Tokenizer TokenIds"),
                    *_of(
                        "kvell.models.text.chat_template",
                        "ChatTemplate ChosenTemplate chosen_template",
                    ),
                    "kvell.models.text.chat_template.ContentFormat",
                    "kvell.models.sources.progress.Progress",
                    *_of("kvell.clock", "Clock MonotonicClock VirtualClock"),
                    "kvell.engine.core.journal.Journal",
                    *_of(
                        "kvell.mempool.rendezvous",
                        "Rendezvous FolderRendezvous PdCaching PageTransport PoolRole",
                    ),
                    "kvell.wire.endpoints.Endpoint",
                    *_of("kvell.vocabulary", "FinishReason RequestId"),
                ),
                "Objects that arguments and attributes of :class:`kvell.LLM` have.",
            ),
        ),
    ),
    PythonPage(
        "async_engine",
        "AsyncEngine: instances in processes of their own",
        "What ``kvell serve`` does behind its HTTP interface, for programs that use asyncio.",
        (
            Section("The class", ("kvell.AsyncEngine",)),
            Section(
                "What it takes and returns",
                (
                    "kvell.async_engine.Prompt",
                    "kvell.StreamedOutput",
                    "kvell.fleet.started.front_limits.FrontLimits",
                    "kvell.fleet.started.supervisor.RestartPolicy",
                    "kvell.engine.setup.engine_settings.EngineSettings",
                    "kvell.engine.setup.options.EngineOptions",
                    "kvell.cluster.routing.policies.ROUTINGS",
                ),
            ),
            Section(
                "What instances say of themselves",
                (
                    "kvell.fleet.fleet.MemberStatus",
                    "kvell.fleet.fleet.InstanceState",
                    *_of("kvell.engine.protocol.placements", "RequestPlacementEntry"),
                    *_of(
                        "kvell.engine.protocol.statistics",
                        "InstanceReport InstanceFacts ModelLengths ModelWeights LoadStats Stats "
                        "GroupStats",
                    ),
                    "kvell.cost.prices.ExecCosts",
                    *_of(
                        "kvell.engine.protocol.notices",
                        "IndexNotice IndexedGroup BlocksStored BlocksRemoved BlocksHeld",
                    ),
                ),
            ),
        ),
    ),
    PythonPage(
        "sampling",
        "Sampling parameters",
        "How the tokens of an answer are chosen, and when it ends.",
        (
            Section("The class", ("kvell.SamplingParams",)),
            Section(
                "What its fields hold",
                (
                    "kvell.RequestOutputKind",
                    "kvell.StructuredOutputs",
                    "kvell.Reasoning",
                    "kvell.engine.protocol.structured_outputs.Calls",
                    "kvell.engine.protocol.structured_outputs.CallForm",
                    "kvell.engine.protocol.structured_outputs.ReasoningBudget",
                    "kvell.engine.protocol.schemas.strict.StrictPart",
                    "kvell.engine.protocol.logprobs.TokenLogprobs",
                ),
            ),
        ),
    ),
    PythonPage(
        "memory",
        "The memory core as a library",
        "``kvell.memory`` decides which request gets which pages.  It imports no torch and holds\n"
        "no bytes.  :doc:`/docs/memory-library` explains its words and the calls of a step.",
        (
            Section(
                "What a model stores",
                (
                    *_memory("LayerSpec GroupKind IMAGE_KINDS GroupSpec Layout plan_layout"),
                    *_memory("MANAGERS Manager"),
                    "kvell.pages.layout.Association",
                    *_memory("Embeddings as_draft plan_groups_into MAX_REGISTERED_PADDING"),
                ),
            ),
            Section(
                "A core and its calls",
                (
                    *_memory(
                        "create_core register MemoryCore WithholdingCore HoldingCore VisibleCore"
                    ),
                    *_memory("Eviction EVICTIONS common_prefix"),
                ),
            ),
            Section(
                "Arrays, and their columns",
                (
                    *_memory("Ints Tokens"),
                    "kvell.prefix.interface.LongInts",
                    *_of("kvell.pages.rows", "NewPageRow SourceRow CheckpointRow PageCountRow"),
                    *_of("kvell.pages.rows", "LargePageRow SmallPageRow IndexChangeRow"),
                    *_memory("NAMED DROPPED MOVED"),
                ),
            ),
            Section("Images", _memory("Images ImageSpan Facts facts_of")),
            Section(
                "What fits",
                _memory("fits_alone longest_request requests_that_fit request_bytes")
                + _memory("pool_bytes_for large_pages_needed pages_of_text"),
            ),
            Section("Rules of a group", _memory("GroupPolicy policy_of alignment_tokens")),
            Section(
                "What is in a pool",
                _memory("PoolTotals PoolSnapshot HolderSnapshot IndexEntry audit"),
            ),
        ),
    ),
    PythonPage(
        "errors",
        "Errors",
        "Whoever gets a :class:`~kvell.errors.ChangeSomething` must change what it names; whoever\n"
        "gets a :class:`~kvell.errors.TryLater` can try the same again.",
        (
            Section(
                "The two families",
                _of("kvell.errors", "KvellError ChangeSomething UnknownArgument TryLater"),
            ),
            Section(
                "Errors of served requests",
                (
                    "kvell.errors.InstanceDied",
                    "kvell.errors.RequestFailed",
                    "kvell.server.text.text_stream.RequestRefused",
                    "kvell.fleet.instance.instance_process.InstanceStartError",
                ),
            ),
        ),
    ),
)
"""All pages of the Python reference, in order."""

PUBLIC = tuple(name for one in PAGES for name in one.names)
"""Every public name, as users import it."""
