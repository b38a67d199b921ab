"""The extension pages, followed literally. A package, so that its modules share `blocks`."""
