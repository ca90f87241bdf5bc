package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"aether/controlplane/registry"
)

// Pauses before the store is tried again: drawn between the n-th double of retryMin
// and twice that, and never longer than retryMax.
const (
	retryMin = time.Second
	retryMax = 30 * time.Second
	// steady is how long a watch has to last for its end to be a first one again.
	steady = 10 * time.Second
)

// errCompacted: what was to be watched is no longer kept.
var errCompacted = errors.New("the changes since the list are no longer kept (compacted)")

// Watch is registry.Store's. It returns ctx's error.
func (s *Store) Watch(ctx context.Context, on func(registry.Change), report func(error)) error {
	f := &follower{s: s, on: on, report: report}
	for failures := 0; ; {
		start := time.Now()
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.Breaks.Inc()
		if time.Since(start) >= steady {
			failures = 0
		}
		if errors.Is(err, errCompacted) && failures == 0 { // the list is all that it takes
			failures++
			continue
		}
		wait := s.pause(failures)
		failures++
		err = fmt.Errorf("etcd: follow %v: %w; again in %v", s.cfg.Endpoints, err, wait.Round(100*time.Millisecond))
		report(err)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

func retryPause(failures int) time.Duration {
	least := min(retryMin<<min(failures, 10), retryMax/2)
	return least + rand.N(least)
}

// follower is one Watch.
type follower struct {
	s      *Store
	on     func(registry.Change)
	report func(error)

	known held
}

// follow lists, and then watches until that breaks off.
func (f *follower) follow(ctx context.Context) error {
	c, err := f.s.conn(ctx)
	if err != nil {
		return err
	}
	var rows []registry.Row
	at, err := f.s.pages(ctx, c, registry.Root, func(k, v []byte) {
		if k, e, ok := f.s.read(k, v); ok {
			rows = append(rows, registry.Row{Region: k.Region, Cluster: k.Cluster, Service: k.Service, Protocol: k.Protocol, IP: k.IP, Endpoint: e})
		}
	})
	if err != nil {
		return err
	}
	f.s.Lists.Inc()
	f.listed(at, rows)
	f.s.progress.listed(at.revision)
	return f.watch(ctx, c, at)
}

// point is where in which history a store stands.
type point struct {
	cluster  uint64
	revision int64
}

// pages reads all keys that begin with prefix, as they stood at one point.
func (s *Store) pages(ctx context.Context, c *clientv3.Client, prefix string, each func(key, value []byte)) (at point, err error) {
	limit := int64(pageRows)
	for from, end := prefix, clientv3.GetPrefixRangeEnd(prefix); ; {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(limit)}
		if at.revision != 0 {
			opts = append(opts, clientv3.WithRev(at.revision))
		}
		r, err := s.get(ctx, c, from, opts...)
		switch {
		case limit > 1 && status.Code(err) == codes.ResourceExhausted: // larger than maxMessage
			limit /= 4
			continue
		case err != nil:
			return point{}, fmt.Errorf("list: %w", err)
		case at.revision == 0:
			at = point{r.Header.GetClusterId(), r.Header.GetRevision()}
		case r.Header.GetClusterId() != at.cluster:
			return point{}, errTwoClusters(at.cluster, r.Header.GetClusterId())
		}
		for _, kv := range r.Kvs {
			each(kv.Key, kv.Value)
		}
		if !r.More || len(r.Kvs) == 0 {
			return at, nil
		}
		from = string(r.Kvs[len(r.Kvs)-1].Key) + "\x00"
	}
}

func errTwoClusters(a, b uint64) error {
	return fmt.Errorf("the endpoints are of two clusters (%x and %x): name the members of one", a, b)
}

// watch hears of everything after at. The client's own watcher is not used: it goes on
// by itself after an interruption, also where the store has been set back behind the
// revision that it asks for, and then hears nothing any more.
func (f *follower) watch(ctx context.Context, c *clientv3.Client, at point) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := etcdserverpb.NewWatchClient(c.ActiveConnection()).Watch(clientv3.WithRequireLeader(ctx), grpc.MaxCallRecvMsgSize(maxMessage))
	if err != nil {
		cancel()
		return fmt.Errorf("watch: %w", rpctypes.Error(err))
	}
	type said struct {
		r   *etcdserverpb.WatchResponse
		err error
	}
	in, ended := make(chan said), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r, err := stream.Recv()
			select {
			case in <- said{r, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() { cancel(); <-ended }()
	if err := stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{CreateRequest: &etcdserverpb.WatchCreateRequest{
		Key: []byte(registry.Root), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(registry.Root)), StartRevision: at.revision + 1, ProgressNotify: true,
	}}}); err != nil {
		return fmt.Errorf("watch: %w", rpctypes.Error(err))
	}
	created := time.NewTimer(requestTimeout)
	defer created.Stop()
	grace := time.NewTimer(max(0, time.Until(f.known.until)))
	defer grace.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-created.C:
			return errors.New("watch: the server does not begin it")
		case <-grace.C:
			f.release()
		case m := <-in:
			if m.err != nil {
				return fmt.Errorf("watch: %w", rpctypes.Error(m.err))
			}
			switch r := m.r; {
			case r.GetCompactRevision() != 0:
				return errCompacted
			case r.GetCanceled():
				return fmt.Errorf("watch: the server ended it: %s", r.GetCancelReason())
			case r.GetHeader().GetClusterId() != at.cluster:
				return errTwoClusters(at.cluster, r.GetHeader().GetClusterId())
			case r.GetCreated():
				created.Stop()
				f.report(f.known.lost())
			}
			f.heard(m.r)
		}
	}
}

// heard takes what changed.
func (f *follower) heard(r *etcdserverpb.WatchResponse) {
	f.known.at.revision = max(f.known.at.revision, r.GetHeader().GetRevision())
	if len(r.GetEvents()) == 0 {
		if !r.GetCreated() { // whose revision is the server's, and the events until then are still to come
			f.s.progress.hears(r.GetHeader().GetRevision())
		}
		return
	}
	var rows []registry.Row
	var last int64
	for _, ev := range r.GetEvents() {
		kv := ev.GetKv()
		last = kv.GetModRevision()
		if ev.GetType() == mvccpb.Event_DELETE {
			f.s.named.mended(kv.GetKey())
			if k, err := registry.ParseKey(kv.GetKey()); err == nil && k.Kind == registry.EndpointKey {
				rows = f.known.remove(rows, k)
			}
			continue
		}
		k, e, ok := f.s.read(kv.GetKey(), kv.GetValue())
		switch {
		case ok:
			rows = f.known.put(rows, k, e)
		case k.Kind == registry.EndpointKey: // what stood there is no longer so
			rows = f.known.remove(rows, k)
		}
	}
	if len(rows) > 0 {
		f.on(registry.Change{Rows: rows, Version: strconv.FormatInt(last, 10)})
	}
	f.s.progress.hears(last) // there may be more until the header's revision
	if f.known.settled() {
		f.report(nil)
	}
}
