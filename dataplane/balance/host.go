package balance

import (
	"math"
	"net/netip"
	"time"
)

// Host is one endpoint as its caller knows it.
type Host struct {
	Addr netip.AddrPort
	User any // the caller's

	open uint32 // requests, or connections, under way
	// peak is the peak EWMA of latencies in nanoseconds, 0 without one, at the time
	// peaked; trouble is failures, at the time troubled. They fade from then on.
	peak     float64
	peaked   int64
	trouble  float64
	troubled int64
	used     int64 // time of the last Begin

	// For ejection.
	errors  uint8  // 5xx in a row (contract 5.6)
	locals  uint8  // failures in a row without any answer between them
	streak  uint8  // ejections, less the intervals without one
	event   uint64 // the last failure's
	until   int64  // ejected until then
	ejected uint32 // ejections in all
}

// latency is the peak, where less than least is that much; 0: it is not known.
func (h *Host) latency() float64 {
	if h.peak == 0 {
		return 0
	}
	return max(h.peak, float64(least))
}

// fade is what is left now of what was then.
func fade(then, now int64) float64 {
	switch x := float64(now-then) / float64(memory); {
	case x <= 0:
		return 1
	case x < 1./64: // two terms are right to a millionth, and cost next to nothing
		return 1 - x + x*x/2
	default:
		return math.Exp(-x)
	}
}

// faded is the latency as it may be by now.
func (h *Host) faded(now int64) float64 { return h.latency() * fade(h.peaked, now) }

// Peak is the estimate of the latency as of the last answer; 0: there is none.
func (h *Host) Peak() time.Duration { return time.Duration(h.peak) }

// Open is how many requests, or connections, are under way.
func (h *Host) Open() int { return int(h.open) }

// Trouble is how many failures the host is remembered for at the time now.
func (h *Host) Trouble(now int64) float64 {
	if h.trouble == 0 {
		return 0
	}
	return h.trouble * fade(h.troubled, now)
}

// EjectedFor is how long the host is still ejected; 0: it is not.
func (h *Host) EjectedFor(now int64) time.Duration { return max(0, time.Duration(h.until-now)) }

// Ejections counts how often the host was ejected.
func (h *Host) Ejections() int { return int(h.ejected) }

// Begin counts a request, or connection, that is given to h.
func (d *Dest) Begin(h *Host, now int64) {
	h.open++
	h.used = now
	d.open++
}

// End counts it out again.
func (d *Dest) End(h *Host) {
	h.open--
	d.open--
}

// Tunnel tells that a request has become an open tunnel, which counts by itself.
func (d *Dest) Tunnel() {
	d.open--
	d.tunnels++
}

// EndTunnel counts a tunnel out.
func (d *Dest) EndTunnel(h *Host) {
	h.open--
	d.tunnels--
}

// FullOfTunnels reports whether the destination has as many open tunnels as it may have.
func (d *Dest) FullOfTunnels() bool { return d.tunnels >= MaxTunnels }

// Retry counts a request that is being sent again, until Settled. false: as many are as may be.
func (d *Dest) Retry() bool {
	if d.retrying >= MaxRetrying {
		return false
	}
	d.retrying++
	return true
}

// Settled gives a place back that Retry took.
func (d *Dest) Settled() { d.retrying-- }

// Full reports whether the destination has as many requests, or connections, under
// way as it may have: a further one overflows (contract 5.6).
func (d *Dest) Full() bool { return d.open >= MaxOpen }

// Answered tells of an answer with this HTTP status that took so long; took 0: not
// measured. It reports whether h was ejected for it; members is how many endpoints
// the destination has.
//
// The estimate is a peak EWMA: it follows a rise at once and a fall slowly. Only
// answers below 400 let it fall: an error is no work.
func (d *Dest) Answered(h *Host, now int64, took time.Duration, status, members int) (ejected bool) {
	h.locals = 0
	if t := float64(min(took, most)); took > 0 && status < 400 {
		if t < h.peak {
			f := fade(h.peaked, now)
			t = h.peak*f + t*(1-f)
		}
		h.peak, h.peaked = t, now
	} else {
		h.raise(now, took)
	}
	if status < 500 {
		h.errors = 0
		h.relieve(now)
		return false
	}
	h.hurt(now, halfFailed)
	if h.until > now { // it is out already, for what led to this
		return false
	}
	if h.errors++; h.errors < maxErrors {
		return false
	}
	h.errors = 0
	return d.eject(h, now, members)
}

// Failed tells that a request, or a connect, ended without an answer after so long.
// event numbers what happened: the failures of one event, as the requests that
// waited for one connect, count as one. It reports whether h was ejected for it.
func (d *Dest) Failed(h *Host, now int64, took time.Duration, event uint64, members int) (ejected bool) {
	if h.locals > 0 && h.event == event {
		return false
	}
	h.raise(now, took)
	h.hurt(now, failed)
	h.event = event
	if h.until > now {
		return false
	}
	if h.locals++; h.locals < maxLocals {
		return false
	}
	h.locals = 0
	return d.eject(h, now, members)
}

// Refused tells that h took nothing of a request and said so: no fault, and a
// reason to go elsewhere for a while.
func (d *Dest) Refused(h *Host, now int64) { h.hurt(now, halfFailed) }

// Connected tells of a connection that was made.
func (d *Dest) Connected(h *Host, now int64) {
	h.locals = 0
	h.relieve(now)
}

// GaveUp tells that nobody waits for a request any more, which took so long: it says
// something only if it already was the slowest.
func (d *Dest) GaveUp(h *Host, now int64, took time.Duration) { h.raise(now, took) }

// raise lifts an estimate that there is: what did not answer says nothing of how
// long an answer takes, only that it takes longer.
func (h *Host) raise(now int64, took time.Duration) {
	if t := float64(min(took, most)); h.peak > 0 && t > h.peak {
		h.peak, h.peaked = t, now
	}
}

func (h *Host) hurt(now int64, by float64) {
	h.trouble, h.troubled = min(h.Trouble(now)+by, mostTrouble), now
}

// relieve: a success makes up for half of what is remembered.
func (h *Host) relieve(now int64) {
	if h.trouble == 0 {
		return
	}
	if h.trouble, h.troubled = h.Trouble(now)/2, now; h.trouble < 0.01 {
		h.trouble = 0
	}
}
