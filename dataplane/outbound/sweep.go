package outbound

import (
	"net/netip"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// sweepAfter is how often what balancing remembers is looked through while there
// is any.
const sweepAfter = time.Minute

// of is what p knows on this loop.
func (st *loopState) of(p *Pod) *upstreams {
	if st.lastPod == p { // most often one pod has a loop's attention for a while
		return st.last
	}
	u := st.pods[p]
	if u == nil {
		u = &upstreams{groups: map[netip.AddrPort]*engine.HopGroup{}, raw: map[*rawConn]struct{}{}}
		st.pods[p] = u
		if !st.sweep.Armed() {
			st.l.Arm(&st.sweep, (*sweeper)(st), int64(sweepAfter))
		}
	}
	st.lastPod, st.last = p, u
	return u
}

// sweeper is a loopState as the task of its timer.
type sweeper loopState

// Run is reactor.Task.
func (s *sweeper) Run() {
	st := (*loopState)(s)
	st.forget(nil)
	if len(st.pods) > 0 {
		st.l.Arm(&st.sweep, s, int64(sweepAfter))
	}
}

// Fail is reactor.Task: what is remembered may be half changed.
func (s *sweeper) Fail(error) {
	clear(s.pods)
	s.lastPod, s.last = nil, nil
}

// forget drops what is idle, and hosts that gone reports.
func (st *loopState) forget(gone func(d *balance.Dest, h *balance.Host) bool) {
	st.forgetNear()
	st.lastPod, st.last = nil, nil
	for p, u := range st.pods {
		u.table.Sweep(st.l.Now(), gone)
		if p.Context.Err() != nil || u.table.Empty() && len(u.groups) == 0 && len(u.raw) == 0 && u.nears == 0 && u.mirrors == 0 {
			delete(st.pods, p)
		}
	}
}

// nearIdle is how long an endpoint of this node is kept known after its last request.
const nearIdle = time.Minute

// forgetNear lets go of endpoints of this node that nothing has been sent to for a while.
func (st *loopState) forgetNear() {
	for _, h := range st.hops {
		if n, ok := h.hop.(*engine.InProcess); ok && n.Idle() >= nearIdle {
			n.Close(nil)
		}
	}
}

// endpointID is a port of an endpoint, as sessions and connections know it.
type endpointID struct {
	addr netip.AddrPort
	port uint16
	pin  string // "": whoever it is
}

// endpointChanges are the places that are not what they were.
type endpointChanges struct{ gone, sick map[endpointID]struct{} }

// OnSnapshot takes in what snap says of endpoints that are in use: sessions and raw-TCP
// connections to one that is not there any more, or is unhealthy, or is somebody else, are
// closed at once; those to one that drains are left alone (contract 5.5). Only requests
// that are under way at one that is not there any more have a moment to end (decision 029). It looks at what differs
// from the snapshot of the last call, so it is to be told of each that is in force, in
// order. Safe for concurrent use.
func (o *Outbound) OnSnapshot(snap *snapshot.Snapshot) {
	o.sweep.Lock()
	defer o.sweep.Unlock() // loops are told in order, too
	before := o.swept
	o.swept = snap
	if before == nil {
		return // nothing is in use
	}
	d := removedEndpoints(before, snap)
	if len(d.gone)+len(d.sick) == 0 {
		return
	}
	o.loops.Each(func(st *loopState) {
		for k, h := range st.hops {
			if err := d.causeOf(k); err != nil {
				delete(st.hops, k)
				h.gone = true
				if d.hasLeft(k) {
					h.hop.Leave(err)
				} else {
					h.hop.Close(err)
				}
			}
		}
		for _, u := range st.pods {
			for r := range u.raw {
				if err := d.causeOf(r.key); err != nil {
					r.cut(err)
				}
			}
		}
		st.forget(func(dest *balance.Dest, h *balance.Host) bool {
			_, gone := d.gone[endpointID{addr: h.Addr, port: dest.Port}]
			return gone
		})
	})
}

func (d *endpointChanges) causeOf(k hopKey) error {
	p := endpointID{k.addr, k.port, k.pin}
	if _, gone := d.gone[p]; gone {
		return errEndpointGone
	}
	if _, sick := d.sick[p]; sick {
		return errEndpointUnhealthy
	}
	return nil
}

// hasLeft reports whether nobody is at k's place any more, so that it is not somebody else's.
func (d *endpointChanges) hasLeft(k hopKey) bool {
	_, left := d.gone[endpointID{addr: k.addr, port: k.port}]
	return left
}

// removedEndpoints works out what of before is not, or is unhealthy, in now. It costs what
// differs, and a look at each endpoint if one has gone.
func removedEndpoints(before, now *snapshot.Snapshot) endpointChanges {
	d := endpointChanges{map[endpointID]struct{}{}, map[endpointID]struct{}{}}
	sick := func(port uint16, set *snapshot.EndpointSet) {
		for _, e := range set.All() {
			if e.Health == model.Unhealthy {
				d.sick[endpointID{e.Addr, port, e.SPIFFEID}] = struct{}{}
				d.sick[endpointID{addr: e.Addr, port: port}] = struct{}{}
			}
		}
	}
	ports := map[uint16]struct{}{}
	for _, b := range before.Backends() {
		was := before.Endpoints(b)
		is := was.None()
		if n := now.Backend(b); n != nil {
			is = now.Endpoints(n)
		}
		if was == is {
			continue
		}
		for _, e := range was.All() {
			i := is.Find(e.Addr)
			if i < 0 {
				d.gone[endpointID{addr: e.Addr, port: b.Port}] = struct{}{}
			}
			if i < 0 || is.At(i).SPIFFEID != e.SPIFFEID {
				d.gone[endpointID{e.Addr, b.Port, e.SPIFFEID}] = struct{}{}
				ports[b.Port] = struct{}{}
			}
		}
		sick(b.Port, is)
	}
	for _, b := range now.Backends() {
		if before.Backend(b) == nil {
			sick(b.Port, now.Endpoints(b))
		}
	}
	if len(d.gone) == 0 {
		return d
	}
	// What another destination has, or the same one by another class, has not gone.
	for _, b := range now.Backends() {
		if _, may := ports[b.Port]; !may {
			continue
		}
		for _, e := range now.Endpoints(b).All() {
			any := endpointID{addr: e.Addr, port: b.Port}
			delete(d.gone, any)
			any.pin = e.SPIFFEID
			delete(d.gone, any)
		}
	}
	return d
}
