package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane"
	"aether/dataplane"
	"aether/dataplane/listen"
)

const (
	takeTime   = 30 * time.Second       // that a predecessor has to hand its sockets over
	adminRetry = 200 * time.Millisecond // between two tries to listen for the admin
	podsTime   = 3 * time.Second        // that the pods' life has to end before a successor is told that it may lead them
)

// takeOver gives owner the sockets of the process before this one; nil: there is none.
func takeOver(ctx context.Context, leave <-chan struct{}, o options, owner *listen.Owner, log *slog.Logger) (*listen.Predecessor, error) {
	if o.handover == "" {
		return nil, nil
	}
	short, cancel := context.WithTimeout(ctx, takeTime)
	defer cancel()
	go func() {
		select {
		case <-leave:
			cancel()
		case <-short.Done():
		}
	}()
	p, err := listen.TakeOver(short, o.handover, owner)
	switch {
	case errors.Is(err, listen.ErrNoPredecessor):
		return nil, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		// It may be wedged, and whoever started this process wants it to serve.
		log.Error("nothing is taken over; sockets are opened as they become free", "path", o.handover, "err", err)
		return nil, nil
	}
	for _, err := range p.Left {
		log.Warn("a socket of the predecessor's is of no use here", "err", err)
	}
	log.Info("sockets taken over", "path", o.handover, "sockets", p.Sockets)
	return p, nil
}

// handover is the process's place in the row of those that serve this node.
type handover struct {
	o      options
	log    *slog.Logger
	node   *dataplane.Node
	owner  *listen.Owner
	before *listen.Predecessor // nil: there is none
	admin  *http.Server        // nil: there is none
	loop   *controlplane.Loop

	lead  chan struct{} // closed when this process may lead the node's pods: nobody before it does
	idle  chan struct{} // closed when it does so no more, or has never; nil: it leads none
	taken chan struct{} // closed, under mu, when a successor accepts
	mu    sync.Mutex
	ln    net.Listener // the admin's; guarded by mu
}

// run takes the predecessor's place, then waits to be told to leave, or for a
// successor, and drains. Its end is the process's.
func (h *handover) run(ctx context.Context, leave <-chan struct{}) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if h.admin != nil {
		context.AfterFunc(ctx, func() { h.admin.Close() })
	}
	errs := make(chan error, 2)
	wg.Go(func() {
		if err := h.begin(ctx); err != nil {
			errs <- err
			return
		}
		if h.admin != nil {
			wg.Go(func() {
				if err := h.serveAdmin(ctx); err != nil {
					errs <- err
				}
			})
		}
		if err := h.offer(ctx); err != nil {
			errs <- err
		}
	})
	select {
	case <-ctx.Done():
		return nil
	case err := <-errs:
		return err
	case <-leave:
		h.log.Info("told to stop: draining; once more ends at once", "drain-time", h.o.drainTime)
	case <-h.taken:
		h.mu.Lock() // until this process accepts no more
		h.mu.Unlock()
		h.log.Info("a successor serves: draining", "drain-time", h.o.drainTime)
	}
	h.node.Drain(ctx, h.o.drainTime)
	return nil
}

// begin makes the node serve in the predecessor's place. A failure leaves the predecessor
// as it was.
func (h *handover) begin(ctx context.Context) error {
	if h.before == nil {
		close(h.lead)
		return nil
	}
	if err := h.node.Open(ctx); err != nil {
		h.before.Close()
		return nil // told to stop
	}
	switch err := h.before.Ready(ctx); {
	case err == nil:
		h.node.Alone()
	case ctx.Err() == nil:
		h.log.Error("the predecessor may still accept connections, and lead the node's pods: end it", "err", err)
	default:
		return nil
	}
	close(h.lead)
	return nil
}

// offer hands over to a successor, if one comes.
func (h *handover) offer(ctx context.Context) error {
	if h.o.handover == "" || ctx.Err() != nil {
		return nil
	}
	f, err := listen.NewOffer(h.o.handover, listen.OfferConfig{
		Owner: h.owner,
		Begin: func() {
			h.log.Info("a successor takes the sockets")
			h.loop.Save() // it begins with that, and has the file from now on
			h.loop.HoldSaves(true)
			h.node.Freeze(true)
		},
		Failed: func(err error) {
			h.log.Warn("the successor did not take over: serving as before", "err", err)
			if ctx.Err() == nil { // else it ended because we do: it has the sockets, and finds that we are gone
				h.node.Freeze(false)
				h.loop.HoldSaves(false)
			}
		},
		Taken: func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			close(h.taken)
			if h.ln != nil {
				h.ln.Close() // connections to it go on
			}
			if err := h.node.HandOver(); err != nil {
				h.log.Error("not all sockets were handed over in order", "err", err)
			}
			h.leaveThePods()
		},
	})
	if err != nil {
		return fmt.Errorf("--handover: %w", err)
	}
	if _, err := f.Serve(ctx); err != nil {
		h.log.Error("no successor can take over any more", "err", err)
	}
	return nil
}

// leaveThePods returns once this process leads the node's pods no more (contract 13.5): what
// it has on disk of them is then what the successor begins with.
func (h *handover) leaveThePods() {
	if h.idle == nil {
		return
	}
	late := time.NewTimer(podsTime)
	defer late.Stop()
	select {
	case <-h.idle:
	case <-late.C:
		h.log.Error("this process still leads the node's pods while its successor begins to: end it", "after", podsTime)
	}
}

// serveAdmin serves the admin, once its address is free. It never ends the process
// that was taken over: the successor has the address.
func (h *handover) serveAdmin(ctx context.Context) error {
	for said := false; ; {
		ln, err := h.listenAdmin()
		if err == nil {
			if ln == nil {
				return nil
			}
			err = h.admin.Serve(ln)
			select {
			case <-h.taken:
				return nil
			default:
			}
			if errors.Is(err, http.ErrServerClosed) || ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("admin: %w", err)
		}
		if !errors.Is(err, unix.EADDRINUSE) || h.o.handover == "" {
			return err
		}
		if !said {
			h.log.Warn("the admin waits for its address to be free", "err", err)
			said = true
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(adminRetry):
		}
	}
}

// listenAdmin listens for the admin; nil: a successor does.
func (h *handover) listenAdmin() (net.Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.taken:
		return nil, nil
	default:
	}
	ln, err := h.owner.Admin(h.o.adminAddr)
	if err == nil {
		h.ln = ln
	}
	return ln, err
}
