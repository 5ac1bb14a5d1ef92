from ftengine.api.chat.routes import routes

__all__ = ["routes"]
