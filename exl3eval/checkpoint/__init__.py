"""Reading model directories: safetensors headers, EXL3 modules, inventory."""
