package client

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"aether/dataplane/model"
)

// names is a set of services.
type names map[model.ServiceName]struct{}

func (n names) has(x model.ServiceName) bool {
	_, ok := n[x]
	return ok
}

func (n names) add(x model.ServiceName) { n[x] = struct{}{} }

// scope is what a stream is asked for: all, or these. It does not change.
type scope struct {
	all   bool
	names names
}

func (s scope) has(n model.ServiceName) bool { return s.all || s.names.has(n) }

func (s scope) equal(o scope) bool { return s.all == o.all && maps.Equal(s.names, o.names) }

// news is why the demand has changed: one or several of these.
type news uint8

const (
	moreWanted    news = 1 << iota
	somebodyWaits      // a request or connection does, for rows that are not here
	tidyUp             // a minute has gone by
)

// demand is what the node needs (contract 9.9), and what is known of names.
type demand struct {
	c    *Client
	news chan news // of one

	mu       sync.Mutex
	declared names
	leaving  names                           // were declared when last it was asked what is in use
	asked    map[model.ServiceName]time.Time // when it was last asked for or used
	crowded  bool                            // more than maxAsked are in use
	wide     string                          // why all is asked for though it need not be; empty: it is not. The follower writes it
	catalog  names                           // nil: not known yet
	main     *watch                          // the streams that are complete; their scopes do not change
	delta    *watch
}

func (d *demand) init(c *Client) {
	d.c, d.news = c, make(chan news, 1)
	d.declared, d.leaving, d.asked = names{}, names{}, map[model.ServiceName]time.Time{}
}

// tell wakes the follower up.
func (d *demand) tell(n news) {
	for {
		select {
		case d.news <- n:
			return
		default:
		}
		select {
		case was := <-d.news:
			n |= was
		default:
		}
	}
}

// Answer is what is known of a name that is asked for.
type Answer uint8

// The answers.
const (
	NoSuchName Answer = iota // the catalog does not have it: it is not waited for (contract 9.9)
	Coming                   // its rows are asked for
	Here                     // the Sink has heard of its rows, or that there are none
)

// SetDeclared says which services the node needs in any case: those of its own pods,
// those that its pods declare as upstreams, and those whose addresses it answers
// for (contract 9.9). It replaces what was said before and keeps nothing of list.
func (c *Client) SetDeclared(list []model.ServiceName) {
	now := make(names, len(list))
	for _, n := range list {
		now.add(n)
	}
	d := &c.demand
	d.mu.Lock()
	more := false
	for n := range now {
		more = more || !d.declared.has(n)
	}
	for n := range d.declared { // others than who declared it may use it: the next pruning asks
		d.leaving.add(n)
	}
	for n := range now {
		delete(d.leaving, n)
	}
	d.declared = now
	d.mu.Unlock()
	if more && !c.cfg.Whole { // what is not needed any more goes with the next pruning
		d.tell(moreWanted)
	}
}

// Want asks for the rows of a service that a request waits for (contract 4.6), and
// says what is known of it. It returns at once and never blocks a loop of the data plane.
func (c *Client) Want(n model.ServiceName) Answer {
	d := &c.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	here := d.main.covers(n) || d.delta.covers(n)
	switch {
	case c.cfg.Whole:
	case d.declared.has(n):
		if !here {
			d.tell(somebodyWaits)
		}
	case d.catalog != nil && !d.catalog.has(n) && !here:
		c.Rejected.Inc()
		return NoSuchName
	default:
		_, known := d.asked[n]
		if room := d.askLocked(n, time.Now()); !room { // then all there are
			known, d.crowded = d.crowded, true
		} else if !known {
			c.log.Info("service comes into scope", "service", n.String())
		}
		if !known {
			c.Misses.Inc()
		}
		if !known && !here {
			d.tell(somebodyWaits)
		}
	}
	if here {
		return Here
	}
	return Coming
}

// askLocked puts a name among those that are asked for; false: there is no room, for all that
// are were used lately. Where there is none, the one goes that was not used for longest.
func (d *demand) askLocked(n model.ServiceName, now time.Time) bool {
	if _, ok := d.asked[n]; !ok && len(d.asked) >= maxAsked {
		var oldest model.ServiceName
		at := now
		for n, t := range d.asked {
			if t.Before(at) {
				oldest, at = n, t
			}
		}
		if now.Sub(at) < lately {
			return false
		}
		delete(d.asked, oldest)
	}
	d.asked[n] = now
	return true
}

// Used says that traffic went to services lately: those that were asked for stay in scope
// for an hour from now (contract 4.6). While rows of all services are here nobody asks, and
// use is all that tells what is to stay when they are not any more.
func (c *Client) Used(list ...model.ServiceName) {
	d := &c.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	for _, n := range list {
		if _, ok := d.asked[n]; ok || !d.declared.has(n) && (d.catalog == nil || d.catalog.has(n)) {
			d.askLocked(n, now)
		}
	}
}

// Declared and Asked are how many services are in scope, by why they are.
func (c *Client) Declared() int {
	c.demand.mu.Lock()
	defer c.demand.mu.Unlock()
	return len(c.demand.declared)
}

// Asked is Declared's other half: what was asked for, and is not idle yet.
func (c *Client) Asked() int {
	c.demand.mu.Lock()
	defer c.demand.mu.Unlock()
	return len(c.demand.asked)
}

// Catalog is how many names there are in the mesh.
func (c *Client) Catalog() int {
	c.demand.mu.Lock()
	defer c.demand.mu.Unlock()
	return len(c.demand.catalog)
}

// wanted is what the streams should be for: everything, where it is more than can be named.
// The follower calls it.
func (d *demand) wanted() scope {
	if d.c.cfg.Whole {
		return scope{all: true}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s := scope{names: maps.Clone(d.declared)}
	for n := range d.asked {
		s.names.add(n)
	}
	for n := range d.leaving {
		s.names.add(n)
	}
	bytes := 0
	for n := range s.names {
		bytes += len(n.Namespace) + len("/") + len(n.Name) + 3 // a tag and a length before each
	}
	most, mostBytes := maxNamed, maxNamedBytes
	if d.wide != "" { // not to and fro
		most, mostBytes = most*7/8, mostBytes*7/8
	}
	switch {
	case d.crowded:
		d.wide = fmt.Sprintf("pods of this node use more than %d services that none of them declares", maxAsked)
	case len(s.names) > most || bytes > mostBytes:
		d.wide = fmt.Sprintf("this node needs more services than the %d, or %d bytes of names, that a registrar is asked for by name", maxNamed, maxNamedBytes)
	default:
		d.wide = ""
		return s
	}
	return scope{all: true}
}

// serving: these streams are complete.
func (d *demand) serving(main, delta *watch) {
	d.mu.Lock()
	d.main, d.delta = main, delta
	d.mu.Unlock()
}

// named puts a name into the catalog, or takes it out.
func (d *demand) named(n model.ServiceName, in bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.catalog == nil {
		d.catalog = names{}
	}
	if in {
		d.catalog.add(n)
	} else {
		delete(d.catalog, n)
	}
}

func (d *demand) setCatalog(all names) {
	d.mu.Lock()
	d.catalog = all
	d.mu.Unlock()
}

// prune drops, every minute, what was asked for and has been idle for too long.
func (c *Client) prune(ctx context.Context) {
	if c.cfg.Whole {
		return
	}
	t := time.NewTicker(pruneEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		d := &c.demand
		d.mu.Lock()
		left := maps.Clone(d.leaving)
		d.mu.Unlock()
		if c.cfg.InUse != nil {
			c.Used(c.cfg.InUse(ctx)...)
		}
		d.mu.Lock()
		for n := range left {
			delete(d.leaving, n)
		}
		for n, at := range d.asked {
			if time.Since(at) > idleTTL {
				delete(d.asked, n)
			}
		}
		d.crowded = d.crowded && len(d.asked) > maxAsked/2
		d.mu.Unlock()
		d.tell(tidyUp)
	}
}
