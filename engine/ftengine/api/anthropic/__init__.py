from ftengine.api.anthropic.routes import routes

__all__ = ["routes"]
