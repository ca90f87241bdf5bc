//go:build race

package reactor

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// owner is the thread of a loop. The race detector sees two threads in one place only if nothing
// orders them; this sees every call from another one, ordered or not.
type owner struct{ tid atomic.Int64 }

// ownThread: a loop keeps its thread, however it waits, so that it can be told from others.
const ownThread = true

// take makes the calling thread, which is locked to its goroutine, the loop's. Before that
// whoever made the loop may do with it what it likes.
func (o *owner) take() { o.tid.Store(int64(unix.Gettid())) }

// check panics where the loop runs on another thread than the caller's.
func (o *owner) check(method string) {
	if of, on := o.tid.Load(), int64(unix.Gettid()); of != 0 && of != on {
		panic(fmt.Sprintf("reactor: %s is called on thread %d, its loop runs on %d: give the loop a function by Post", method, on, of))
	}
}
