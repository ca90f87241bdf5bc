// Package services keeps the generated Services (contract 9.8): for every mesh service
// with rows a selectorless ClusterIP Service of its name, whose ports are what its rows
// declare.
//
//   - One replica writes: whoever holds the Lease. Its writes are bounded in rate.
//   - A Service without the label aether.io/mesh-service is a user's and is never
//     touched: an Event on it says why the mesh has no Service of that name.
//   - A generated Service is brought back to what it should be, whoever changed it; whose
//     fields are taken back is named.
//   - A Service goes only once its service has had no rows for a while, and many at once
//     only after a much longer one. Of an empty registry nothing is ever concluded.
//
// Decision 026 says why. It knows nothing of stores and nodes.
package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
)

// What a generated Service carries (contract 1.2, 1.6).
const (
	Label      = "aether.io/mesh-service" // "true"
	Annotation = "aether.io/service"      // the service's bare name
)

// Manager is the field manager that generated Services are applied by, and what its
// Events come from.
const Manager = "aether-registrar"

// Lease is the name of the Lease that the writing replica holds.
const Lease = "aether-registrar-services"

// Source is the registrar's snapshot: what it serves to nodes.
type Source interface {
	// Synced is closed once the snapshot has been whole for the first time.
	Synced() <-chan struct{}
	// Changed returns a channel that is sent to, without waiting, whenever rows have
	// changed, and what ends that.
	Changed() (changed <-chan struct{}, end func())
	// Services gives every service that has rows, with its pods' rows.
	Services() iter.Seq2[model.ServiceName, []*registrypb.ServiceEndpoint]
}

// Config of a Generator.
type Config struct {
	Client    kubernetes.Interface // required; what it may have to do is in rbac.yaml
	Rows      Source               // required
	Identity  string               // required: this replica's own name, most often its pod's
	Namespace string               // required: where the Lease is
	Log       *slog.Logger         // nil: discard

	// Interval is how often everything is looked at again, and the least time between
	// two attempts at a Service that cannot be written; 0: 5 s.
	Interval time.Duration
	// PruneAfter is how long a service has no rows before its Service goes; 0: 90 s, the
	// grace of contract 4.12.
	PruneAfter time.Duration
	// MassPruneAfter is the same where many would go at once; 0: 10 minutes.
	MassPruneAfter time.Duration
	// LeaseTime is how long the Lease outlives a replica that does not renew it; 0: 15 s.
	LeaseTime time.Duration
}

// Generator keeps the Services while it leads. Make it with New.
type Generator struct {
	cfg   Config
	leads atomic.Bool

	created, updated, deleted, repaired telemetry.Counter
	conflicts, failed, refused          telemetry.Counter
	services, users, held               atomic.Int64
}

// New makes a Generator; nothing is written before Run.
func New(c Config) (*Generator, error) {
	switch {
	case c.Client == nil:
		return nil, errors.New("services: no client of Kubernetes")
	case c.Rows == nil:
		return nil, errors.New("services: no source of rows")
	case c.Identity == "" || c.Namespace == "":
		return nil, fmt.Errorf("services: the Lease needs an identity and a namespace, not %q and %q", c.Identity, c.Namespace)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Interval = cmp.Or(c.Interval, 5*time.Second)
	c.PruneAfter = cmp.Or(c.PruneAfter, 90*time.Second)
	c.MassPruneAfter = cmp.Or(c.MassPruneAfter, 10*time.Minute)
	c.LeaseTime = cmp.Or(c.LeaseTime, 15*time.Second)
	return &Generator{cfg: c}, nil
}

// Leads reports whether this replica is the one that writes.
func (g *Generator) Leads() bool { return g.leads.Load() }

// Register makes the generator's gauges and counters known to m. Call it once.
func (g *Generator) Register(m *telemetry.Metrics) {
	m.Gauge("aether_registrar_services_leader", "1 while this replica writes the generated Services.", func() float64 {
		if g.Leads() {
			return 1
		}
		return 0
	})
	gauge := func(name, help string, n *atomic.Int64) {
		m.Gauge(name, help, func() float64 { return float64(n.Load()) })
	}
	gauge("aether_registrar_services_generated", "Generated Services that exist, as the leader sees them.", &g.services)
	gauge("aether_registrar_services_user_owned", "Services of the mesh whose name a user's Service has.", &g.users)
	gauge("aether_registrar_services_prune_held", "Services without rows that are kept, because they are too many at once.", &g.held)
	const help = "Writes of generated Services."
	m.Count("aether_registrar_services_writes_total", help, &g.created, "verb", "create")
	m.Count("aether_registrar_services_writes_total", help, &g.updated, "verb", "apply")
	m.Count("aether_registrar_services_writes_total", help, &g.repaired, "verb", "repair")
	m.Count("aether_registrar_services_writes_total", help, &g.deleted, "verb", "delete")
	m.Count("aether_registrar_services_conflicts_total", "Fields of generated Services that had to be taken back from another manager.", &g.conflicts)
	m.Count("aether_registrar_services_errors_total", "Writes of generated Services that failed.", &g.failed)
	m.Count("aether_registrar_services_events_failed_total", "Events that could not be written.", &g.refused)
}

// Run keeps the Services whenever this replica leads, until ctx ends. All that it
// started has ended when it returns, and the Lease is somebody else's to take.
func (g *Generator) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := g.campaign(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// campaign waits to lead, and leads until the Lease is lost or ctx ends.
func (g *Generator) campaign(ctx context.Context) error {
	led := make(chan context.Context, 1)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Name: Lease,
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: g.cfg.Namespace, Name: Lease},
			Client:     g.cfg.Client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: g.cfg.Identity},
		},
		LeaseDuration: g.cfg.LeaseTime, RenewDeadline: g.cfg.LeaseTime * 2 / 3, RetryPeriod: g.cfg.LeaseTime * 2 / 15,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(lead context.Context) { led <- lead },
			OnStoppedLeading: func() {},
			OnNewLeader: func(who string) {
				g.cfg.Log.Info("generated Services have a writer", "leader", who, "here", who == g.cfg.Identity)
			},
		},
	})
	if err != nil {
		return fmt.Errorf("services: election: %w", err)
	}
	// The Lease outlives ctx until the work has ended, so that nobody else works meanwhile.
	elect, resign := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		elector.Run(klog.NewContext(elect, klog.New(nil)))
	}()
	defer func() {
		resign()
		<-ended
	}()
	select {
	case lead := <-led:
		work, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(lead, cancel)()
		g.leads.Store(true)
		newKeeper(g).run(work)
		g.leads.Store(false)
	case <-ended:
	case <-ctx.Done():
	}
	return nil
}
