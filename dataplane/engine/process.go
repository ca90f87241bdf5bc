package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"

	"aether/dataplane/reactor"
)

// Config of an engine. The zero value is usable.
type Config struct {
	MaxLoops int              // 0: GOMAXPROCS
	MinLoops int              // open from the start, MaxLoops at most; 0: one
	Blocking reactor.Blocking // how loops wait
	Files    int              // descriptors that the process may have; 0: RLIMIT_NOFILE as it is
	Memory   int64            // bytes of memory that the process may use; 0: no limit, and nothing is shed for memory
	Used     func() uint64    // bytes in use; nil: the live heap and the stacks
	Now      func() int64     // monotonic clock; nil: the real one
	Log      *slog.Logger     // nil: discard
}

// process is what all loops and pods of an engine share. Its methods are safe for concurrent use.
type process struct {
	cfg   Config
	log   *slog.Logger
	ctx   context.Context // ends with Run
	wg    sync.WaitGroup  // goroutines that Run waits for
	going atomic.Int64    // those of Loop.Go

	budget files
	files  atomic.Int64 // descriptors accounted to pods
	npods  atomic.Int64
	scarce atomic.Bool // the reserve is near: ask before accepting

	level atomic.Uint32 // Level
	sheds [shedKinds]atomic.Uint64
}

var errPodGone = errors.New("engine: the pod was removed")

// Shed is how often k has happened.
func (p *process) Shed(k Shed) uint64 { return p.sheds[k].Load() }

func (p *process) shed(k Shed) { p.sheds[k].Add(1) }

// Level is how short of memory the process is.
func (p *process) Level() Level { return Level(p.level.Load()) }

// Files is how many descriptors are accounted to all pods.
func (p *process) Files() int64 { return p.files.Load() }

// podHeld is how many bytes a pod may hold on a loop.
func (p *process) podHeld() int {
	if m := p.cfg.Memory; m > 0 {
		return int(min(podHeld, m/4))
	}
	return podHeld
}
