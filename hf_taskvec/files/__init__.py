"""What is in a folder, and how to write one: safetensors files, complete folders, the format of saved vectors."""
