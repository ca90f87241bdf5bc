package engine

import "sync/atomic"

// Shed is how often k has happened. Safe for concurrent use.
func (e *Engine) Shed(k Shed) uint64 { return e.sheds[k].Load() }

func (e *Engine) shed(k Shed) { e.sheds[k].Add(1) }

// Level is how short of memory the process is. Safe for concurrent use.
func (e *Engine) Level() Level { return Level(e.level.Load()) }

// pressure is an engine's side of overload.
type pressure struct {
	over  overload // the ticker's
	level atomic.Uint32
	sheds [shedKinds]atomic.Uint64
}

// podHeld is how many bytes a pod may hold on a loop.
func (e *Engine) podHeld() int {
	if m := e.cfg.Memory; m > 0 {
		return int(min(podHeld, m/4))
	}
	return podHeld
}
