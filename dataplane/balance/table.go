package balance

import (
	"net/netip"
	"slices"
	"time"

	"aether/dataplane/snapshot"
)

// KeepIdle is how long a host is remembered that nothing was sent to: longer than
// any ejection, and until every estimate has faded.
const KeepIdle = 10 * time.Minute

// keepView is how long a view is kept that nobody picks from: long enough to serve
// a busy caller while endpoints change all the time, and no longer, because each
// change makes a set of its own.
const keepView = time.Second

// Table is what one caller has learnt: of the endpoints of all destinations. Its
// zero value is empty and ready.
type Table struct {
	views map[viewKey]*View
	last  *View // that was asked for; nil: none
	dests map[string]*Dest
}

// viewKey: ports whose pods are the same share a set, and share nothing else.
type viewKey struct {
	b   *snapshot.Backend
	set *snapshot.EndpointSet
}

// Dest is one destination of one caller: a port of a service.
type Dest struct {
	Name string // the backend's
	Port uint16 // the backend's
	open int    // of all hosts, less tunnels

	tunnels  int // open ones
	retrying int // requests that are being sent again

	hosts map[netip.AddrPort]*Host
	views []*View
	gen   uint32 // changes when a view has to look at ejections anew
}

// View is set, which is b's or a subset of it, as the caller knows it. It may be
// used until the next Sweep.
func (t *Table) View(b *snapshot.Backend, set *snapshot.EndpointSet) *View {
	if v := t.last; v != nil && v.set == set && v.of == b {
		return v
	}
	v := t.views[viewKey{b, set}]
	if v == nil {
		v = t.makeView(b, set)
	}
	t.last = v
	return v
}

func (t *Table) makeView(b *snapshot.Backend, set *snapshot.EndpointSet) *View {
	d := t.Dest(b)
	v := &View{dest: d, of: b, set: set, hosts: make([]*Host, set.Len()), gen: d.gen - 1}
	for a, h := range d.hosts {
		if i := set.Find(a); i >= 0 {
			v.hosts[i] = h
		}
	}
	d.views = append(d.views, v)
	if t.views == nil {
		t.views = map[viewKey]*View{}
	}
	t.views[viewKey{b, set}] = v
	return v
}

// Dest is the destination b, made if it is new.
func (t *Table) Dest(b *snapshot.Backend) *Dest {
	d := t.dests[b.Name]
	if d == nil {
		d = &Dest{Name: b.Name, Port: b.Port, hosts: map[netip.AddrPort]*Host{}}
		if t.dests == nil {
			t.dests = map[string]*Dest{}
		}
		t.dests[b.Name] = d
	}
	return d
}

// Host is what is known of the endpoint at a, made if it is new.
func (d *Dest) Host(a netip.AddrPort) *Host {
	h := d.hosts[a]
	if h == nil {
		h = &Host{Addr: a}
		d.hosts[a] = h
		d.link(a, h)
	}
	return h
}

// link puts h, or nil, where views look for it.
func (d *Dest) link(a netip.AddrPort, h *Host) {
	for _, v := range d.views {
		if i := v.set.Find(a); i >= 0 {
			v.hosts[i] = h
		}
	}
}

// Sweep forgets views that were not used lately, and hosts that gone
// reports, or that have been idle for KeepIdle. Call it when endpoints changed, and
// now and then. gone may be nil. What a caller still holds of it stays usable.
func (t *Table) Sweep(now int64, gone func(d *Dest, h *Host) bool) {
	t.last = nil
	for k, v := range t.views {
		if now-v.used > int64(keepView) {
			delete(t.views, k)
			v.dest.views = slices.DeleteFunc(v.dest.views, func(o *View) bool { return o == v })
		}
	}
	for name, d := range t.dests {
		for a, h := range d.hosts {
			idle := h.open == 0 && h.until <= now && now-h.used > int64(KeepIdle)
			if idle || gone != nil && gone(d, h) {
				delete(d.hosts, a)
				d.link(a, nil)
				d.gen++
			}
		}
		if len(d.hosts) == 0 && len(d.views) == 0 && d.open == 0 && d.tunnels == 0 && d.retrying == 0 {
			delete(t.dests, name)
		}
	}
}

// Empty reports whether nothing is kept.
func (t *Table) Empty() bool { return len(t.dests) == 0 && len(t.views) == 0 }

// Each tells of all hosts, in no order.
func (t *Table) Each(f func(d *Dest, h *Host)) {
	for _, d := range t.dests {
		for _, h := range d.hosts {
			f(d, h)
		}
	}
}
