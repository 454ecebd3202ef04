"""Text of reports: lines that are alike as one, sections, and sizes in bytes. It knows nothing of the rest."""
