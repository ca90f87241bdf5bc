package outbound

import (
	"time"

	"aether/dataplane/balance"
)

// attempt is a request, or a connection, that is with an endpoint, or was.
type attempt struct {
	dest  *balance.Dest
	host  *balance.Host
	began int64
	open  bool // not counted out yet
	pipe  bool // it is an open tunnel
	told  bool // what became of it has been told
	cold  bool // it waits for a session to be made: how long it takes says nothing
}

// choice is what pick chose.
type choice struct {
	dest *balance.Dest
	host *balance.Host
}

func (a *attempt) begin(d *balance.Dest, h *balance.Host, now int64, cold bool) {
	*a = attempt{dest: d, host: h, began: now, open: true, cold: cold}
	d.Begin(h, now)
}

// tunnelled: the attempt is an open tunnel from here on.
func (a *attempt) tunnelled() {
	if a.open && !a.pipe {
		a.pipe = true
		a.dest.Tunnel()
	}
}

// took is how long the attempt has been under way; 0: that says nothing.
func (a *attempt) took(now int64) time.Duration {
	if a.cold {
		return 0
	}
	return max(1, time.Duration(now-a.began)) // at least a nanosecond: it was measured
}
