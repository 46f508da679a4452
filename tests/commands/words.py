"""Settings as words of a command line."""


def words_of(**settings) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]
