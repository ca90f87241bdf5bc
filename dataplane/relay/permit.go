package relay

import (
	"runtime"
	"sync"
)

// spareProcs is how many of the scheduler's processors relays leave to everybody else.
const spareProcs = 1

// permits are what directions take to work, each from its read to its last write. There is
// one less than there are processors of the scheduler (GOMAXPROCS; its later changes are not
// followed): a loop that wakes up finds one free, however many relays have bytes to move. Without, it
// would stand in one queue with them all, up to 10 ms behind each. The channel hands permits on in the order in which
// they were asked for, so relays share alike.
var permits = sync.OnceValue(func() chan struct{} {
	return make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-spareProcs))
})

// permit is one direction's. Whoever waits for a peer, or for a lock that a peer may keep taken,
// gives it back meanwhile.
type permit struct {
	all  chan struct{}
	held bool
}

// acquire waits for a permit, unless it is held. A nil permit needs none.
func (t *permit) acquire() {
	if t != nil && !t.held {
		if t.all == nil {
			t.all = permits()
		}
		t.all <- struct{}{}
		t.held = true
	}
}

// release gives the permit back, if it is held.
func (t *permit) release() {
	if t != nil && t.held {
		<-t.all
		t.held = false
	}
}
