package outbound

import (
	"net/netip"
	"strings"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/model"
)

// Sessions tells of up to limit hop sessions on the loop l, of pod ("shop/web-1"; "": of
// all), and how many there are; wall is the time of day. On the loop.
func (o *Outbound) Sessions(l *engine.Loop, pod string, limit int, wall time.Time) (list []engine.SessionState, total int) {
	for k, h := range o.loops.Get(l).hops {
		if pod != "" && k.pod.Engine.Name != pod {
			continue
		}
		h.hop.Sessions(wall, func(s engine.SessionState) {
			if total++; len(list) < limit {
				s.Identity, s.Endpoint, s.Port, s.Peer = k.pod.ID.String(), k.addr, k.port, k.pin
				list = append(list, s)
			}
		})
	}
	return list, total
}

// EndpointState is what one pod knows of one endpoint, on one loop. The names in
// JSON are a promise to scripts; new ones may be added.
type EndpointState struct {
	Pod         string         `json:"pod"` // "shop/web-1"
	Loop        int            `json:"loop"`
	Destination string         `json:"destination"` // "shop/cart:8080"
	Endpoint    netip.AddrPort `json:"endpoint"`
	Open        int            `json:"open"`                 // requests, or raw-TCP connections, under way
	Sessions    int            `json:"sessions"`             // hop sessions
	LatencyMS   float64        `json:"latency_ms"`           // peak EWMA up to the answer's head; 0: not known
	Trouble     float64        `json:"trouble"`              // recent failures, fading
	EjectedMS   int64          `json:"ejected_ms,omitempty"` // for so long yet; 0: it is not
	Ejections   int            `json:"ejections,omitempty"`  // as long as it is remembered
}

// Endpoints tells of up to limit endpoints that pod ("shop/web-1"; "": any) has used
// lately from the loop l, in no order, and how many there are. On the loop.
func (o *Outbound) Endpoints(l *engine.Loop, pod string, limit int) (list []EndpointState, total int) {
	now := l.Now()
	for p, u := range o.loops.Get(l).pods {
		if pod != "" && p.Engine.Name != pod {
			continue
		}
		u.table.Each(func(d *balance.Dest, h *balance.Host) {
			if total++; len(list) >= limit {
				return
			}
			s := EndpointState{
				Pod: p.Engine.Name, Loop: l.ID(), Destination: d.Name, Endpoint: h.Addr, Open: h.Open(),
				LatencyMS: float64(h.Peak()) / 1e6, Trouble: h.Trouble(now), EjectedMS: h.EjectedFor(now).Milliseconds(), Ejections: h.Ejections(),
			}
			if t, _ := h.User.(*target); t != nil && t.hop != nil && !t.hop.gone {
				s.Sessions = t.hop.hop.Open()
			}
			list = append(list, s)
		})
	}
	return list, total
}

// Used are the services that pods sent something to from the loop l in the last
// balance.KeepIdle, each once. On the loop.
func (o *Outbound) Used(l *engine.Loop) (list []model.ServiceName) {
	seen := map[string]struct{}{}
	for _, u := range o.loops.Get(l).pods {
		u.table.Each(func(d *balance.Dest, _ *balance.Host) {
			name := d.Name[:max(0, strings.LastIndexByte(d.Name, ':'))]
			if _, ok := seen[name]; ok {
				return
			}
			seen[name] = struct{}{}
			if ns, n, ok := strings.Cut(name, "/"); ok {
				list = append(list, model.ServiceName{Namespace: ns, Name: n})
			}
		})
	}
	return list
}
