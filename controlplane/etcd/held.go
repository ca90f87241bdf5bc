package etcd

import (
	"fmt"
	"strconv"
	"time"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// lossFloor is how many rows have to be gone at once, beside half of them, for a list
// to be one of a store that has lost them. An empty one always is.
const lossFloor = 16

// held is what has been said of the store: which rows there are, and those of them that
// are said still although the store has lost them. Rows themselves are not kept.
type held struct {
	at   point // the last that was heard of; zero: nothing yet
	rows map[group]map[string]struct{}
	n    int

	why     error // why some are kept; nil: none are
	until   time.Time
	missing map[pod]map[group]struct{}
}

// group is a service's rows of one class, by address.
type group struct {
	region, cluster string
	service         model.ServiceName
	protocol        registrypb.Service_Protocol
}

// pod is who has an address.
type pod struct{ region, cluster, ip string }

func groupOf(k registry.Key) (group, pod) {
	return group{k.Region, k.Cluster, k.Service, k.Protocol}, pod{k.Region, k.Cluster, k.IP}
}

func (g group) row(ip string, e *registrypb.ServiceEndpoint) registry.Row {
	return registry.Row{Region: g.region, Cluster: g.cluster, Service: g.service, Protocol: g.protocol, IP: ip, Endpoint: e}
}

// add remembers a row.
func (h *held) add(g group, ip string) {
	in := h.rows[g]
	if in == nil {
		in = map[string]struct{}{}
		h.rows[g] = in
	}
	if _, known := in[ip]; !known {
		in[ip] = struct{}{}
		h.n++
	}
}

// drop forgets one, and reports whether it was known.
func (h *held) drop(g group, ip string) bool {
	in := h.rows[g]
	if _, known := in[ip]; !known {
		return false
	}
	delete(in, ip)
	if h.n--; len(in) == 0 {
		delete(h.rows, g)
	}
	return true
}

// put is a row that is there, appended to rows.
func (h *held) put(rows []registry.Row, k registry.Key, e *registrypb.ServiceEndpoint) []registry.Row {
	g, p := groupOf(k)
	h.found(g, p)
	rows = h.evict(rows, g, p)
	h.add(g, k.IP)
	return append(rows, g.row(k.IP, e))
}

// remove is one that is not any more.
func (h *held) remove(rows []registry.Row, k registry.Key) []registry.Row {
	g, p := groupOf(k)
	h.found(g, p)
	if !h.drop(g, k.IP) {
		return rows
	}
	return append(rows, g.row(k.IP, nil))
}

// found: the store itself has spoken of the row, so it is not missing.
func (h *held) found(g group, p pod) {
	if in := h.missing[p]; in != nil {
		if delete(in, g); len(in) == 0 {
			delete(h.missing, p)
		}
	}
}

// evict takes missing rows away whose address is another service's now: that is said,
// and not only silence.
func (h *held) evict(rows []registry.Row, g group, p pod) []registry.Row {
	for old := range h.missing[p] {
		if old.service != g.service {
			h.found(old, p)
			h.drop(old, p.ip)
			rows = append(rows, old.row(p.ip, nil))
		}
	}
	return rows
}

// lost is why rows are kept that the store does not have.
func (h *held) lost() error {
	if h.why == nil {
		return nil
	}
	return fmt.Errorf("%w; %d rows that it had are kept until %s, unless they are written again",
		h.why, h.missingRows(), h.until.UTC().Format(time.TimeOnly+" UTC"))
}

func (h *held) missingRows() (n int) {
	for _, in := range h.missing {
		n += len(in)
	}
	return n
}

// settled ends the keeping once nothing is missing any more, and reports that.
func (h *held) settled() bool {
	if h.why == nil || len(h.missing) > 0 {
		return false
	}
	h.why, h.missing = nil, nil
	return true
}

// listed takes a whole list.
func (f *follower) listed(at point, rows []registry.Row) {
	h := &f.known
	version := strconv.FormatInt(at.revision, 10)
	old := *h
	now := held{at: at, rows: make(map[group]map[string]struct{}, len(old.rows))}
	for i := range rows {
		g, _ := groupOf(rows[i].Key())
		now.add(g, rows[i].IP)
	}
	gone := 0
	for g, in := range old.rows {
		for ip := range in {
			if _, there := now.rows[g][ip]; !there {
				gone++
			}
		}
	}
	why := old.why // the grace begins anew with each interruption
	switch {
	case gone == 0:
		why = nil
	case at.cluster != old.at.cluster:
		why = fmt.Errorf("the store is another cluster's (%x, was %x)", at.cluster, old.at.cluster)
	case at.revision < old.at.revision:
		why = fmt.Errorf("the store was set back: it is at revision %d and was at %d", at.revision, old.at.revision)
	case len(rows) == 0:
		why = fmt.Errorf("the store is empty, and had %d rows", old.n)
	case gone > lossFloor && gone > old.n/2:
		why = fmt.Errorf("the store has lost %d of %d rows at once", gone, old.n)
	}
	if why == nil || f.s.cfg.Grace < 0 {
		*h = now
		f.on(registry.Change{Whole: true, Rows: rows, Version: version})
		return
	}
	// What it has is in force at once, what it lacks is kept.
	now.why, now.until, now.missing = why, time.Now().Add(f.s.cfg.Grace), map[pod]map[group]struct{}{}
	for g, in := range old.rows {
		for ip := range in {
			if _, there := now.rows[g][ip]; there {
				continue
			}
			p := pod{g.region, g.cluster, ip}
			if now.missing[p] == nil {
				now.missing[p] = map[group]struct{}{}
			}
			now.missing[p][g] = struct{}{}
		}
	}
	for p, in := range now.missing {
		for g := range in {
			now.add(g, p.ip)
		}
	}
	var change []registry.Row
	for i := range rows {
		g, p := groupOf(rows[i].Key())
		change = append(now.evict(change, g, p), rows[i])
	}
	*h = now
	f.s.Withheld.Add(uint64(h.missingRows()))
	f.s.log.Warn("the registry has lost rows", "reason", h.lost(), "missing", h.missingRows(), "of", old.n, "grace", f.s.cfg.Grace)
	f.on(registry.Change{Rows: change, Version: version})
	h.settled() // which is reported once the watch has begun
}

// release believes the store, once the grace is over.
func (f *follower) release() {
	h := &f.known
	if h.why == nil {
		return
	}
	var rows []registry.Row
	for p, in := range h.missing {
		for g := range in {
			h.drop(g, p.ip)
			rows = append(rows, g.row(p.ip, nil))
		}
	}
	f.s.log.Warn("rows that the registry has lost are taken away", "reason", h.why, "rows", len(rows))
	h.why, h.missing = nil, nil
	if len(rows) > 0 {
		f.on(registry.Change{Rows: rows, Version: strconv.FormatInt(h.at.revision, 10)})
	}
	f.report(nil)
}
