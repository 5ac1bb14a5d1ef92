from ftengine.api.responses.routes import routes

__all__ = ["routes"]
