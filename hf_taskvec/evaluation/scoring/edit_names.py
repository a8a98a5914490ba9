"""What the edits of a sweep are called: by their λ, or each by a name of its own."""

from dataclasses import dataclass

#: what tables call the model as it is, beside edits with names
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class EditNames:
    """From the number that a report knows an edit by to what a reader calls it.

    Args:
        names (`tuple[str]`, *optional*):
            Those of the edits 1, 2, …, the gentlest first; 0 is the untouched model. Without names the numbers are
            values of λ.

    Example:
        >>> EditNames().short(-0.5), EditNames().phrase(-0.5)
        ('−0.5', 'λ=-0.5')
        >>> named = EditNames(("-0.5*a", "repaired"))
        >>> named.short(0.0), named.short(2.0), named.phrase(2.0)
        ('untouched', 'repaired', 'the edit “repaired”')

    """

    names: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        """What one of them is."""
        return "edit" if self.names else "λ"

    @property
    def gentlest(self) -> str:
        """What the chosen one is among those that qualify."""
        return "gentlest edit" if self.names else "smallest |λ|"

    def short(self, scale: float) -> str:
        """As a cell of a table."""
        if not self.names:
            return f"{scale:g}".replace("-", "−")
        if scale not in range(len(self.names) + 1):  # of a file that somebody has changed
            return f"edit {scale:g}"
        return self.names[int(scale) - 1] if scale else UNTOUCHED

    def head(self, scale: float) -> str:
        """As the head of a column."""
        return self.short(scale) if self.names else f"λ = {self.short(scale)}"

    def phrase(self, scale: float) -> str:
        """As a part of a sentence."""
        if not self.names:
            return f"λ={scale:g}"
        return f"the edit “{self.short(scale)}”" if scale else "the untouched model"
