"""`python -m hf_taskvec`: the same as `taskvec`."""

from hf_taskvec.cli import main

if __name__ == "__main__":
    main()
