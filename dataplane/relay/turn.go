package relay

import (
	"runtime"
	"sync"
)

// spareProcs is how many of the scheduler's processors relays leave to everybody else.
const spareProcs = 1

// turns are what directions take to work, each from its read to its last write. There is
// one less than there are processors of the scheduler (GOMAXPROCS; its later changes are not
// followed): a loop that wakes up finds one free, however many relays have bytes to move. Without, it
// would stand in one queue with them all, up to 10 ms behind each. The channel hands turns on in the order in which
// they were asked for, so relays share alike.
var turns = sync.OnceValue(func() chan struct{} {
	return make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-spareProcs))
})

// turn is one direction's. Whoever waits for a peer, or for a lock that a peer may keep taken,
// gives it back meanwhile.
type turn struct {
	all  chan struct{}
	held bool
}

// take waits for a turn, unless it is held. A nil turn needs none.
func (t *turn) take() {
	if t != nil && !t.held {
		if t.all == nil {
			t.all = turns()
		}
		t.all <- struct{}{}
		t.held = true
	}
}

// give gives the turn back, if it is held.
func (t *turn) give() {
	if t != nil && t.held {
		<-t.all
		t.held = false
	}
}
