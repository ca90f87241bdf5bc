package outbound

import (
	"context"
	"errors"
	"time"

	"aether/dataplane/engine"
	"aether/meshhop"
)

// nearIdle is how long an endpoint of this node is kept known after its last request.
const nearIdle = time.Minute

// errNotAdmitted: the destination's side of the process took the caller for nobody it serves.
var errNotAdmitted = errors.New("the destination does not serve this port")

func (o *Outbound) neighbour(container string) Neighbour {
	if o.cfg.Neighbour == nil {
		return nil
	}
	return o.cfg.Neighbour(container)
}

// makeNear makes what carries k's requests to n, a pod of this process (decision
// 018). Who the two are is verified as on a hop before the first request, and again
// whenever a certificate, a bundle or the destination's ports have changed.
func (st *loopState) makeNear(k hopKey, mk meshhop.Key, n Neighbour) *hopState {
	h := &hopState{pin: k.pin, near: k.near}
	u := st.of(k.pod)
	u.nears++
	h.hop = st.l.NewNear(k.pod.Engine, n.Engine(), func(ctx context.Context) (engine.Met, error) {
		m, err := st.o.cfg.Dialer.Meet(ctx, mk, n.Local())
		if err != nil {
			if no, ok := errors.AsType[*meshhop.Declined](err); ok {
				n.Declined(no.Err)
			}
			st.o.notOpened(mk, err)
			return engine.Met{}, revoked(err)
		}
		info := n.Admit(st.l, m)
		if info == nil {
			return engine.Met{}, &meshhop.Declined{Err: errNotAdmitted}
		}
		return engine.Met{Info: info, Fresh: m.Fresh, Life: m.Left()}, nil
	}, func() {
		h.gone = true
		u.nears--
		if st.hops[k] == h {
			delete(st.hops, k)
		}
	})
	st.hops[k] = h
	return h
}

// forgetNear lets go of endpoints of this node that nothing has been sent to for a while.
func (st *loopState) forgetNear() {
	for _, h := range st.hops {
		if n, ok := h.hop.(*engine.Near); ok && n.Idle() >= nearIdle {
			n.Close(nil)
		}
	}
}
