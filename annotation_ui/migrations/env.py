"""Alembic's entry point: `Database` hands over a connection that is already open."""

from alembic import context

from annotation_ui.store.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
