package balance

import "time"

// The numbers of contract 5.6, and those of Envoy's defaults that belong to them.
const (
	maxErrors = 5 // 5xx in a row
	maxLocals = 3 // failures of our side of the connection in a row

	baseEjection = 30 * time.Second
	mostEjection = 300 * time.Second // Envoy's default of max_ejection_time
	interval     = 10 * time.Second  // without an ejection, makes the next one a base shorter
	maxEjected   = 50                // percent of a destination's endpoints

	// MaxOpen is how many requests, or raw-TCP connections, of one pod to one
	// destination may be under way: the breakers' 1,024 connections and requests.
	MaxOpen = 1024
	// MaxTunnels is how many tunnels (WebSockets) of one pod to one destination may be open
	// beside them: they are long, and mostly idle.
	MaxTunnels = 8192
	// MaxRetrying is how many requests of one pod to one destination may be under way, or
	// wait, that are being sent again (contract 5.6).
	MaxRetrying = 16
)

// eject takes h out of use, for longer each time, unless too many are out already.
// As in Envoy the one to be ejected counts among them: of two endpoints one may be
// ejected, an only one never. It reports whether h was ejected.
func (d *Dest) eject(h *Host, now int64, members int) bool {
	if h.until > now {
		return false
	}
	out := 1
	for _, o := range d.hosts {
		if o.until > now {
			out++
		}
	}
	if out*100 > members*maxEjected {
		return false
	}
	if h.until != 0 {
		h.streak -= uint8(min((now-h.until)/int64(interval), int64(h.streak)))
	}
	h.streak = min(h.streak+1, uint8(mostEjection/baseEjection))
	h.until = now + int64(baseEjection)*int64(h.streak)
	h.ejected++
	// It comes back as one that nothing is held against.
	h.errors, h.locals, h.trouble = 0, 0, 0
	d.gen++
	return true
}
