package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"aether/controlplane"
	"aether/controlplane/endpointmeta"
	"aether/controlplane/file"
	"aether/controlplane/input"
	"aether/controlplane/kube"
	"aether/controlplane/lastgood"
	"aether/controlplane/local"
	"aether/controlplane/registrar/client"
	"aether/controlplane/registrar/register"
	"aether/controlplane/registry"
	"aether/dataplane"
	"aether/dataplane/admin/guard"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
	"aether/mtls"
	"aether/mtls/spiffeid"
)

// sources are what tells this node of the mesh, and the loop that they tell.
type sources struct {
	o    options
	cfg  controlplane.Config
	node *dataplane.Node
	ids  mtls.Source
	log  *slog.Logger

	loop      *controlplane.Loop
	registrar *client.Client // nil: there is none
	pods      *local.Pods    // whose rows go to registrars; nil: there is none
	follower  *local.Follower
	cluster   *kube.Pods         // what the API server has of them; nil: it is not asked
	lead      <-chan struct{}    // closed once the pods are this process's to lead
	idle      chan struct{}      // closed once it leads them no more; nil: it has none
	left      [2]<-chan struct{} // one is closed once the pods are another process's, or nobody's
	run       []source
}

// source is one that runs beside the loop.
type source struct {
	name string
	run  func(context.Context) error
}

// checkSources says what is missing of the flags.
func (o *options) checkSources() error {
	switch {
	case o.node == "":
		return errors.New("--node is required (see --help)")
	case o.config == "" && len(o.registrar) == 0 && !o.kubernetes && o.kubeconfig == "":
		return errors.New("nobody tells of the mesh: give --config, --registrar or --kubernetes (see --help)")
	case strings.Contains(o.node, "/") || !filepath.IsLocal(o.node) || o.node == ".":
		return fmt.Errorf("--node: %q is no name of a node: write spec.nodeName of its pods", o.node)
	}
	if o.udsDir != "" && (!filepath.IsAbs(o.udsDir) || filepath.Clean(o.udsDir) != o.udsDir) {
		return fmt.Errorf("--uds-dir: %q is no plain absolute path: write one such as %s, or \"\" for none", o.udsDir, model.DefaultUDSDir)
	}
	kubernetes := o.kubernetes || o.kubeconfig != ""
	switch {
	case o.clusterPods == "" && len(o.registrar) > 0 && kubernetes && o.config == "":
		o.clusterPods = podsEvict
	case o.clusterPods == "", o.clusterPods == podsOff:
		o.clusterPods = podsOff
	case o.clusterPods != podsWatch && o.clusterPods != podsEvict:
		return fmt.Errorf("--cluster-pods: %q is none of %s, %s and %s", o.clusterPods, podsOff, podsWatch, podsEvict)
	case len(o.registrar) == 0 || !kubernetes:
		return fmt.Errorf("--cluster-pods=%s needs --registrar, without which this node's pods are not led, and --kubernetes or --kubeconfig, which say of whom to hear", o.clusterPods)
	case o.clusterPods == podsEvict && o.config != "":
		return errors.New("--cluster-pods=evict does not go with --config: an evicted pod is made anew, and no file would say so; write watch")
	}
	if len(o.registrar) == 0 {
		for flag, given := range map[string]bool{
			"--pods-dir": o.podsDir != "", "--registrar-insecure": o.registrarInsecure, "--registrar-whole": o.registrarWhole,
			"--node-spiffe-id": o.nodeForm != "", "--allow-spiffe-id": len(o.identities) > 0, "--health-sock": o.healthSock != "",
		} {
			if given {
				return fmt.Errorf("%s is of no use without --registrar: leave it out, or name a registrar", flag)
			}
		}
		return nil
	}
	for _, form := range o.identities {
		if err := registry.CheckIdentityForm(form); err != nil {
			return fmt.Errorf("--allow-spiffe-id: %w", err)
		}
	}
	if o.nodeForm != "" {
		if o.registrarInsecure {
			return errors.New("--node-spiffe-id is of no use with --registrar-insecure, which shows registrars no identity: leave one of them out")
		}
		if err := registry.CheckNodeForm(o.nodeForm); err != nil {
			return fmt.Errorf("--node-spiffe-id: %w", err)
		}
	}
	if n := len(filepath.Dir(o.healthSock)); n > maxHealthDir {
		return fmt.Errorf("--health-sock: its directory's path has %d bytes, and a socket's may have %d: give a shorter one", n, maxHealthDir)
	}
	if o.podsDir == "" {
		if o.stateDir == "" {
			return errors.New("--registrar needs a place for the records of this node's pods: give --state-dir or --pods-dir")
		}
		o.podsDir = filepath.Join(o.stateDir, "pods", o.node)
	}
	if !o.registrarInsecure {
		return nil
	}
	for _, target := range o.registrar {
		host, _, err := net.SplitHostPort(target)
		if ip, _ := netip.ParseAddr(host); err != nil || host != "localhost" && !ip.IsLoopback() {
			return fmt.Errorf("--registrar-insecure: %s is not on the loopback: whoever is on the way could say anything of the mesh", target)
		}
	}
	return nil
}

// The values of --cluster-pods.
const (
	podsOff   = "off"
	podsWatch = "watch"
	podsEvict = "evict"
)

func newSources(o options, node *dataplane.Node, ids mtls.Source, log *slog.Logger) *sources {
	s := &sources{o: o, node: node, ids: ids, log: log, cfg: controlplane.Config{
		Target: node, Node: o.node, Domain: o.domain, TrustDomain: o.trustDomain, Log: log, Settings: o.settings(), UDSDir: o.udsDir,
	}}
	if o.lastGood != "" {
		s.cfg.LastGood = lastgood.New(o.lastGood)
	}
	return s
}

// settings are those of the flags, which hold where no MeshConfig says otherwise.
func (o *options) settings() input.Settings {
	return input.Settings{AccessLogs: o.accessLog, AccessLogSuccess: 100, EmitStatsPod: o.statsPod}
}

// want asks for the rows of a service that something waits for (contract 4.6).
func (s *sources) want(n model.ServiceName) {
	if s.registrar != nil {
		s.registrar.Want(n)
	}
}

// build makes the loop and its sources, by precedence (decision 023).
func (s *sources) build() error {
	s.cfg.OnNeeds = func(n []model.ServiceName) {
		if s.registrar != nil {
			s.registrar.SetDeclared(n)
		}
	}
	s.loop = controlplane.New(s.cfg)
	var registrars client.Config
	if len(s.o.registrar) > 0 {
		registrars.Targets = s.o.registrar
		if !s.o.registrarInsecure {
			if err := s.secure(&registrars); err != nil {
				return err
			}
		}
		if err := s.live(registrars); err != nil {
			return err
		}
	}
	if dir := s.o.config; dir != "" {
		sink := s.loop.Source("file", controlplane.SourceOptions{Final: true})
		how := file.Options{
			Node: s.o.node, Domain: s.o.domain, TrustDomain: s.o.trustDomain, NetNSDir: s.o.netnsDir, RedirectAllDefault: s.o.redirectAll,
		}
		how.Before = func(ctx context.Context) *file.Before {
			b, at, ok, err := sink.Before(ctx)
			if err != nil || !ok {
				return nil
			}
			return &file.Before{Batch: b, At: at}
		}
		if s.pods != nil {
			how.OnPods = s.tellPods
		}
		s.add("file", func(ctx context.Context) error { return file.Feed(ctx, dir, how, s.o.settings(), sink) })
	}
	if len(s.o.registrar) > 0 {
		if err := s.follow(s.loop.Source("registrar", controlplane.SourceOptions{}), registrars); err != nil {
			return err
		}
	}
	if s.o.kubernetes || s.o.kubeconfig != "" {
		at, err := kube.Connect(s.o.kubeconfig)
		if err != nil {
			return err
		}
		k, err := kube.New(kube.Config{
			REST: at, Namespace: s.o.namespace, Flags: s.o.settings(), Sink: s.loop.Source("kubernetes", controlplane.SourceOptions{}), Log: s.log,
		})
		if err != nil {
			return err
		}
		s.add("kubernetes", k.Run)
	}
	return nil
}

// live has this node's pods led, and their rows written to registrars.
func (s *sources) live(registrars client.Config) (err error) {
	caller, err := register.New(register.Config{Targets: registrars.Targets, Credentials: registrars.Credentials})
	if err != nil {
		return err
	}
	var cluster local.Cluster
	if s.o.clusterPods != podsOff {
		at, err := kube.Connect(s.o.kubeconfig)
		if err != nil {
			return err
		}
		s.cluster, err = kube.NewPods(kube.PodsConfig{REST: at, Node: s.o.node, Leaving: func(p kube.Pod) { s.pods.Leaving(clusterPod(p)) }, Log: s.log})
		if err != nil {
			return err
		}
		cluster = known{s.cluster}
		s.add("pods of the API server", s.cluster.Run)
	}
	s.pods, err = local.New(local.Config{
		Dir: s.o.podsDir, Place: s.place(input.Locality{}), TrustDomain: s.o.trustDomain, Identities: s.o.identities, Registry: caller,
		Sink:  s.loop.Source("local", controlplane.SourceOptions{Local: true}),
		Probe: local.Prober(s.node.Dial), Certificate: s.node.HasCertificate, Served: s.node.Await,
		Cluster: cluster, EvictLost: s.o.clusterPods == podsEvict,
		RedirectAllDefault: s.o.redirectAll, Log: s.log,
	})
	if err != nil {
		return fmt.Errorf("--pods-dir, --state-dir: %w", err)
	}
	s.follower = local.NewFollower(s.pods)
	if s.o.healthSock != "" {
		s.add("health socket", func(ctx context.Context) error {
			select {
			case <-s.lead: // before, the process before knows
				if err := serveHealth(ctx, s.o.healthSock, s.pods.Handler()); err != nil {
					s.log.Error("nobody is told of applications' health there", "err", err) // no reason to end the mesh's traffic
				}
			case <-ctx.Done():
			}
			<-ctx.Done()
			return nil
		})
	}
	s.idle = make(chan struct{})
	s.add("pods", func(ctx context.Context) error {
		err := errors.Join(s.leadPods(ctx), caller.Close())
		close(s.idle)
		if err == nil {
			<-ctx.Done()
		}
		return err
	})
	return nil
}

// leadPods leads the node's pods from when they are this process's until they are so no more.
func (s *sources) leadPods(ctx context.Context) (err error) {
	select {
	case <-s.lead:
	case <-s.left[0]:
		return nil
	case <-ctx.Done():
		return nil
	}
	in, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	errs := make(chan error, 2)
	for _, run := range []func(context.Context) error{s.pods.Run, s.follower.Run} {
		wg.Go(func() {
			if err := run(in); err != nil {
				errs <- err
			}
		})
	}
	select {
	case <-s.left[0]:
	case <-s.left[1]:
	case err = <-errs:
	case <-ctx.Done():
	}
	// What this process can no longer reach is no sign that an application is sick.
	stop()
	wg.Wait()
	return err
}

// known is what the API server knows of the node's pods, as local.Cluster.
type known struct{ pods *kube.Pods }

// Pods is local.Cluster's.
func (k known) Pods(ctx context.Context) ([]local.ClusterPod, error) {
	list, err := k.pods.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]local.ClusterPod, len(list))
	for i, p := range list {
		out[i] = clusterPod(p)
	}
	return out, nil
}

// Pod is local.Cluster's.
func (k known) Pod(ctx context.Context, namespace, name string) (local.Pod, error) {
	p, err := k.pods.Get(ctx, namespace, name)
	if errors.Is(err, kube.ErrNoPod) {
		err = fmt.Errorf("%w: %w", local.ErrNoPod, err)
	}
	return local.Pod{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, Account: p.Account, Labels: p.Labels, Annotations: p.Annotations, Volumes: volumesOf(p.Volumes), Terminating: p.Leaving,
	}, err
}

// Evict is local.Cluster's.
func (k known) Evict(ctx context.Context, p local.ClusterPod, reason, message string) error {
	return k.pods.Evict(ctx, kube.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, reason, message)
}

func clusterPod(p kube.Pod) local.ClusterPod {
	return local.ClusterPod{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, Labels: p.Labels, Addresses: p.Addresses, Live: p.Live, Bare: p.Bare, Leaving: p.Leaving, Gone: p.Gone,
		Termination: local.Termination{PreStop: p.PreStop, Grace: p.Grace},
	}
}

func (s *sources) place(at input.Locality) local.Place {
	return local.Place{Cluster: s.o.cluster, Node: s.o.node, Region: at.Region, Zone: at.Zone}
}

// tellPods has the pods of a directory led.
func (s *sources) tellPods(l file.Local) {
	s.pods.SetPlace(s.place(l.Locality))
	list := make([]local.Listed, len(l.Pods))
	for i, p := range l.Pods {
		list[i] = local.Listed{
			Pod: local.Pod{
				Namespace: p.Namespace, Name: p.Name, UID: p.UID, Account: p.Account, ContainerID: p.Container, NetNS: p.NetNS, IPs: p.IPs,
				Labels: p.Labels, Annotations: p.Annotations, Volumes: volumesOf(p.Volumes), Terminating: p.Terminating,
			},
			Termination: local.Termination{PreStop: p.PreStop, Grace: p.Grace},
		}
	}
	s.follower.Tell(list, l.Partial)
}

// volumesOf keeps it that none are known.
func volumesOf(in []model.Volume) []local.Volume {
	if in == nil {
		return nil
	}
	out := make([]local.Volume, len(in))
	for i, v := range in {
		out[i] = local.Volume(v)
	}
	return out
}

// admin is the node's admin, with the health of its pods beside it where that is probed.
func (s *sources) admin(of http.Handler) http.Handler {
	if s.pods == nil {
		return of
	}
	mux := http.NewServeMux()
	mux.Handle("/healthz/", guard.Handler(s.pods.Handler()))
	mux.Handle("/", of)
	return mux
}

// back is the registrars' sink that has the pods look at their rows when a registrar can be
// heard again.
type back struct {
	*controlplane.Source
	pods *local.Pods

	mu        sync.Mutex
	connected bool
}

// Report is input.Sink.
func (b *back) Report(s input.Status) {
	b.Source.Report(s)
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.Connected && !b.connected {
		b.pods.Resync()
	}
	b.connected = s.Connected
}

// follow follows registrars.
func (s *sources) follow(sink *controlplane.Source, cfg client.Config) (err error) {
	cfg.Cluster, cfg.Node, cfg.TrustDomain, cfg.Identities, cfg.Whole = s.o.cluster, s.o.node, s.o.trustDomain, s.o.identities, s.o.registrarWhole
	cfg.InUse, cfg.Sink, cfg.Log = s.node.Used, &back{Source: sink, pods: s.pods}, s.log
	if s.registrar, err = client.New(cfg); err != nil {
		return err
	}
	s.add("registrar", func(ctx context.Context) error {
		if !s.o.registrarWhole {
			// What it is to look for is the others' to say; without that it would say that there is nothing.
			sink.Report(input.Status{Err: "waits for the other sources, which say whose rows are needed"})
			if sink.WaitForOthers(ctx) != nil {
				return nil
			}
		}
		return s.registrar.Run(ctx)
	})
	return nil
}

// secure has registrars met by this node's own identity.
func (s *sources) secure(cfg *client.Config) error {
	own, err := s.o.nodeID()
	if err != nil {
		return err
	}
	server, err := spiffeID("--registrar-account", s.o.registrarAccount, s.o.trustDomain)
	if err != nil {
		return err
	}
	namespace, account, _ := strings.Cut(s.o.nodeAccount, "/")
	const key = "the node itself"
	store := mtls.NewStore(mtls.Config{Source: s.ids, Changed: func(r mtls.Ref, _ *mtls.SVID, err error) {
		if err != nil {
			s.log.Warn("identity of the node", "id", r.ID.String(), "err", err)
		}
	}})
	store.Add(mtls.Ref{Container: key, Namespace: namespace, Account: account, Pod: s.o.node, ID: own})
	s.add("identity of the node", store.Run)
	cfg.Credentials = client.TLS(func() *mtls.SVID { return store.Current(key) }, server)
	return nil
}

// nodeID is the node's own identity.
func (o *options) nodeID() (spiffeid.ID, error) {
	if o.nodeForm == "" {
		return spiffeID("--node-account", o.nodeAccount, o.trustDomain)
	}
	id, err := registry.NodeID(o.nodeForm, o.trustDomain, o.node)
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("--node-spiffe-id, --node: %w", err)
	}
	return id, nil
}

// spiffeID is that of "<namespace>/<account>".
func spiffeID(flag, text, trustDomain string) (spiffeid.ID, error) {
	namespace, account, ok := strings.Cut(text, "/")
	if !ok {
		return spiffeid.ID{}, fmt.Errorf("%s: %q is not <namespace>/<ServiceAccount>", flag, text)
	}
	id, err := spiffeid.ForServiceAccount(trustDomain, namespace, account)
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("%s: %w", flag, err)
	}
	return id, nil
}

func (s *sources) add(name string, run func(context.Context) error) {
	s.run = append(s.run, source{name, run})
}

// gauges make the loop and its sources known to m. Of contract 14.4 the names are those of
// upstream's agent, in Prometheus' spelling.
func (s *sources) gauges(m *telemetry.Metrics) {
	l := s.loop
	m.Gauge("aether_config_seq", "Sequence number of the state in force.", func() float64 { return float64(l.State().Seq) })
	m.Gauge("aether_config_problems", "Objects that are not, or not wholly, in force.", func() float64 { return float64(len(l.State().Problems)) })
	m.Gauge("aether_config_synced", "1 once every source has said its whole state since the start.", func() float64 {
		if l.State().Synced {
			return 1
		}
		return 0
	})
	m.Gauge("aether_config_stale_seconds", "How long ago everything in force was known to be true; 0: it is now.", func() float64 {
		if t := l.Report().StaleSince; t != nil {
			return time.Since(*t).Seconds()
		}
		return 0
	})
	c := &l.Counters
	m.Count("aether_agent_snapshot_builds_total", "States published.", &c.Builds)
	m.CounterOf("aether_agent_snapshot_duration_seconds_total", "Time that compiling and applying them took.", func() float64 {
		return time.Duration(c.BuildNanos.Value()).Seconds()
	})
	m.Count("aether_agent_snapshot_errors_total", "Problems that appeared.", &c.Problems)
	m.Gauge("aether_agent_snapshot_version", "Sequence number of the state in force.", func() float64 { return float64(l.State().Seq) })
	m.Count("aether_agent_refresher_batches_total", "Changes that sources told.", &c.Batches)
	m.Count("aether_agent_snapshot_coalesced_total", "Of what sources told, what came into force together with others.", &c.Coalesced)
	m.Count("aether_last_good_writes_total", "Times that the last good state was written.", &c.Saves)
	m.Count("aether_last_good_errors_total", "Times that it could not be.", &c.SaveErrors)
	m.Gauge("aether_last_good_age_seconds", "Age of the last good state on disk; 0: none is kept, or there is none yet.", func() float64 {
		if g := l.Report().LastGood; g != nil {
			return float64(g.AgeMS) / 1000
		}
		return 0
	})
	for _, s := range l.Report().Sources {
		report := func() (of input.SourceReport) {
			for _, r := range l.Report().Sources {
				if r.Name == s.Name {
					return r
				}
			}
			return of
		}
		m.Gauge("aether_source_connected", "1 while a source hears of changes as they happen.", func() float64 {
			if report().Connected {
				return 1
			}
			return 0
		}, "source", s.Name)
		m.Gauge("aether_source_since_seconds", "How long a source has been connected, or not.", func() float64 {
			if r := report(); !r.Since.IsZero() {
				return time.Since(r.Since).Seconds()
			}
			return 0
		}, "source", s.Name)
	}
	for why := endpointmeta.UDSFine + 1; why < endpointmeta.UDSReasons; why++ {
		m.Count("aether_agent_uds_resolve_failures_total", "Pods that are not delivered to by the Unix socket that was asked for, by reason.", &c.UDSRefused[why], "reason", why.String())
	}
	m.Count("aether_source_disconnects_total", "Times that a source lost what it follows.", &c.Disconnects)
	if s.registrar != nil {
		s.registrar.Register(m)
		s.pods.Register(m)
	}
}
