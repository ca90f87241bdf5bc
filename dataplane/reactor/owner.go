//go:build !race

package reactor

// owner checks nothing in a build without the race detector: a loop's methods are
// called several times a request, and asking for the thread is a system call.
type owner struct{}

// ownThread: whether a loop keeps its thread, however it waits.
const ownThread = false

func (owner) take()        {}
func (owner) check(string) {}
