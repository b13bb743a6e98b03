"""The memory that is left is that of the machine, or of its container if that is less."""

from experiments import machine


def test_available_memory_is_what_the_container_leaves(tmp_path, monkeypatch):
    whole = machine.available_memory()
    assert 0 < whole < 2**50
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_memory() > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.available_memory() > 5000
    (tmp_path / "memory.max").write_text("6000\n")
    assert machine.available_memory() == 5000
    (tmp_path / "memory.current").write_text("7000\n")
    assert machine.available_memory() == 0
