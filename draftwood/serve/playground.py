"""The page at `/`: static files that run in a browser without anything else."""

from __future__ import annotations

from os import PathLike, stat_result
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).with_name("page")
HEADERS = {
    # The page loads from and calls this server alone, and no other page may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # browsers must revalidate: another version may have been installed
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Files(StaticFiles):
    """Files with our headers."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI) -> None:
    """Serve the page at `/` and what belongs to it below `/page`."""

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.mount("/page", Files(directory=FOLDER), name="page")
