package outbound

import (
	"context"
	"errors"

	"aether/dataplane/engine"
	"aether/meshhop"
)

func (o *Outbound) localDestination(container string) LocalDestination {
	if o.cfg.LocalDestination == nil {
		return nil
	}
	return o.cfg.LocalDestination(container)
}

// newInProcess makes what carries k's requests to n, a pod of this process (decision
// 018). Who the two are is verified as on a hop before the first request, and again
// whenever a certificate, a bundle or the destination's ports have changed.
func (st *loopState) newInProcess(k hopKey, mk meshhop.Key, n LocalDestination) *hopState {
	h := &hopState{pin: k.pin, near: k.near}
	u := st.of(k.pod)
	u.nears++
	h.hop = st.l.NewInProcess(k.pod.Engine, n.Engine(), func(ctx context.Context) (engine.LocalPeer, error) {
		m, err := st.o.cfg.Dialer.VerifyLocal(ctx, mk, n.Local())
		if err != nil {
			if no, ok := errors.AsType[*meshhop.RefusedByPeer](err); ok {
				n.Declined(no.Err)
			}
			st.o.notOpened(mk, err)
			return engine.LocalPeer{}, revoked(err)
		}
		info := n.Admit(st.l, m)
		if info == nil {
			return engine.LocalPeer{}, &meshhop.RefusedByPeer{Err: errNotAdmitted}
		}
		return engine.LocalPeer{Info: info, Fresh: m.Fresh, Life: m.Left()}, nil
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
