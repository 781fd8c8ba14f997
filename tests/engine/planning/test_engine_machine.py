"""The engine core under random traffic: every answer right, every step audited."""

from tests.depth import machine
from tests.engine.planning.machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = machine(weight=2.0)
