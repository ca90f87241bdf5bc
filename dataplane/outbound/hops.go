package outbound

import (
	"context"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
	"aether/tproxy/socket"
)

// maxEndpointSessions bounds the hop sessions of one pod to one endpoint over all
// its ports. The first session of a port is always made.
const maxEndpointSessions = 16

// lives reports whether e, which was chosen by an older snapshot, is an endpoint of b still.
func lives(snap *snapshot.Snapshot, b *snapshot.Backend, e *snapshot.Endpoint) bool {
	now := snap.Endpoints(snap.Backend(b)).Like(e)
	return now != nil && now.SPIFFEID == e.SPIFFEID && now.Health != model.Unhealthy
}

// hopFor finds or makes the hop that carries requests of the pod to e, which is host.
func (st *loopState) hopFor(p *Pod, rq *reqState, e *snapshot.Endpoint, host *balance.Host) (*hopState, error) {
	t, _ := host.User.(*target)
	if t == nil {
		t = &target{}
		host.User = t
	}
	near := ""
	if w := rq.snap.Near(e); w != nil {
		near = w.ContainerID
	}
	if h := t.hop; h != nil && !h.gone && h.pin == e.SPIFFEID && h.near == near {
		return h, nil
	}
	h, err := st.makeHop(p, rq, e, near)
	t.hop = h
	return h, err
}

func (st *loopState) makeHop(p *Pod, rq *reqState, e *snapshot.Endpoint, near string) (*hopState, error) {
	b := rq.v.Backend
	k := hopKey{p, e.Addr, b.Port, e.SPIFFEID, near}
	if h := st.hops[k]; h != nil {
		return h, nil
	}
	// OnSnapshot has ended what was there at its time: of an older snapshot no hop is made any more.
	if now := st.o.cfg.Store.Load(); now != rq.snap && !lives(now, b, e) {
		return nil, errEndpointGone
	}
	pin, err := spiffeid.Parse(e.SPIFFEID)
	if err != nil {
		return nil, errNoIdentity
	}
	mk := meshhop.Key{Pod: p.Container, Source: p.ID, Endpoint: e.Addr, SNI: b.SNI, Proto: meshhop.H2, Pin: pin}
	if near != "" {
		if n := st.o.localDestination(near); n != nil && n.Local().ID == pin {
			return st.newInProcess(k, mk, n), nil
		}
		// Not served here yet, or somebody else by now: whoever has the address answers for himself.
		if k.near = ""; st.hops[k] != nil {
			return st.hops[k], nil
		}
	}
	u := st.of(p)
	group := u.groups[e.Addr]
	if group == nil {
		group = &engine.HopGroup{Max: maxEndpointSessions}
		u.groups[e.Addr] = group
	}
	h := &hopState{pin: e.SPIFFEID, near: k.near}
	made := st.l.NewHop(p.Engine, func(ctx context.Context) (int, record.Conn, engine.Bond, error) {
		s, err := st.o.cfg.Dialer.Dial(ctx, mk)
		if err != nil {
			st.o.notOpened(mk, err)
			return -1, nil, nil, err
		}
		rec := s.Record()
		fd, err := socket.TakeFD(s.Conn)
		if err != nil {
			return -1, nil, nil, err
		}
		return fd, rec, st.hold(p, mk, s.Bond, func(err error) {
			_ = st.l.Post(func() {
				if !h.gone {
					h.gone = true
					delete(st.hops, k)
					h.hop.Leave(err)
				}
			})
		}), nil
	}, func() {
		h.gone = true
		if st.hops[k] == h {
			delete(st.hops, k)
		}
		if group.Empty() && u.groups[e.Addr] == group {
			delete(u.groups, e.Addr)
		}
	})
	made.Join(group)
	h.hop = made
	st.hops[k] = h
	return h, nil
}
