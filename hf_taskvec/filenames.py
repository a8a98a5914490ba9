"""The names of the files that tell what a folder holds: those of transformers and PEFT, and our own."""

#: of a model
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
#: every form in which a folder may hold a model's weights, the preferred one first
MODEL_WEIGHTS = (WEIGHTS, WEIGHTS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
#: the index of a checkpoint that torch.distributed.checkpoint wrote, a pickle; and where accelerate puts one
DISTRIBUTED_INDEX = ".metadata"
FSDP_FOLDER = "pytorch_model_fsdp_0"

#: of a PEFT adapter
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_SAFETENSORS = "adapter_model.safetensors"
ADAPTER_WEIGHTS = (ADAPTER_SAFETENSORS, "adapter_model.bin")
#: the same for llama.cpp, beside the others
ADAPTER_GGUF = "adapter.gguf"

#: a saved task vector, for people to read; its tensors lie beside it
VECTOR_RECORD = "taskvec.json"
#: the record of a model that `apply` wrote
MODEL_RECORD = "taskvec_apply.json"
#: the record of an adapter that `to_adapter` wrote, which tells it from one that somebody trained
ADAPTER_RECORD = "taskvec_adapter.json"
#: the record of a fine-tuning run, the checkpoint of an unfinished one, and the folder of the epochs' vectors
TRAINING_RECORD = "training.json"
TRAINING_STATE = "checkpoint.safetensors"
EPOCH_VECTORS = "vectors"
#: the record of a repaired edit, what tells an unfinished one, and the folders of its model and of its two vectors
REPAIR_RECORD = "repair.json"
REPAIR_STARTED = "repair-started.json"
REPAIRED_MODEL = "model"
REPAIRED_VECTOR = "vector"
REPAIR_VECTOR = "repair"
#: the record of a book that `forget` took out of a model
FORGOTTEN_RECORD = "forgotten.json"
#: the model card, of a folder and of a repository on the Hub
MODEL_CARD = "README.md"
#: the sha256 of the card as it was written, which tells whether somebody has changed it since
CARD_DIGEST = ".README.sha256"
#: the command that wrote a folder; it may name paths of this machine
COMMAND_RECORD = "taskvec-command.json"

#: the report of a sweep, and the folder that holds one beside a model, an adapter or a vector
REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_PAGE = "report.html"
#: a published report's scores, a line each, as `datasets` reads them
REPORT_SCORES = "scores.jsonl"
REPORT_FOLDER = "report"
#: a report's plots, without their endings
REPORT_PLOTS = ("scores", "forgetting", "pareto", "samples")
#: the report of an audit, and its plots
AUDIT_JSON = "audit.json"
AUDIT_MARKDOWN = "audit.md"
AUDIT_PLOTS = ("audit-attacks", "audit-relearning", "audit-inside")
#: the report of a named benchmark
BENCHMARK_JSON = "benchmark.json"
BENCHMARK_MARKDOWN = "benchmark.md"

#: where layouts are kept, below the folder that huggingface_hub has for what libraries make of downloads
LAYOUT_CACHE = ("hf_taskvec", "layouts")
#: where pushes that are under way are noted, in the same place
PUSHES = ("hf_taskvec", "pushes")
