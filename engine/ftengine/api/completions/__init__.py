from ftengine.api.completions.routes import routes

__all__ = ["routes"]
