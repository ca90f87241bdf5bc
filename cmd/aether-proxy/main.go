// Command aether-proxy is the node daemon: it carries the traffic of the
// node's mesh pods.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"aether/controlplane/file"
	"aether/controlplane/input"
	"aether/dataplane"
	"aether/dataplane/admin"
	"aether/dataplane/extauthz"
	"aether/dataplane/journal"
	"aether/dataplane/listen"
	"aether/dataplane/model"
	"aether/dataplane/plain"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/telemetry"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/files"
	"aether/mtls/record"
)

type options struct {
	config, node, domain, trustDomain, netnsDir string
	certs, devCA                                string
	adminAddr, logLevel, blocking, records      string
	handover, lastGood, udsDir                  string
	stateDir, podsDir                           string
	registrar                                   []string
	registrarAccount, nodeAccount, cluster      string
	kubeconfig, namespace                       string
	kubernetes                                  bool
	registrarInsecure, registrarWhole           bool
	nodeForm, healthSock                        string
	identities                                  []string
	clusterPods                                 string
	drainTime                                   time.Duration
	memoryLimit, authz                          string
	minLoops, maxLoops                          int
	userTimeout, idleTimeout                    time.Duration
	capture, compat, redirectAll, accessLog     bool
	failureLog, statsPod                        bool
	logFormat                                   string
}

func main() {
	var o options
	// The first signal drains, the second ends.
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	leave := make(chan struct{})
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		close(leave)
		<-signals
		stop()
	}()
	c := &cobra.Command{
		Use:   "aether-proxy",
		Short: "The per-node service-mesh proxy",
		Long: `aether-proxy carries the traffic of a node's mesh pods: it accepts what capture
diverts to it, decides by dialled port and Host, and speaks SPIFFE mTLS to its peers.

SIGTERM drains: clients are told to go, what is under way finishes, and what is left
after --drain-time is cut. A second SIGTERM ends at once. With --handover a further
aether-proxy, started with the same path, takes the listening sockets over and this
one drains: no connection is refused or lost meanwhile.`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), leave, o) },
	}
	f := c.Flags()
	f.StringVar(&o.config, "config", "", "directory of Kubernetes YAML: pods, services, routes. With --registrar only this node's pods are taken of the pods in it, and they are registered there")
	f.StringSliceVar(&o.registrar, "registrar", nil, "registrars, as host:port: who tells of all pods' endpoints")
	f.StringVar(&o.registrarAccount, "registrar-account", "aether-system/aether-registrar", "namespace and ServiceAccount whose identity registrars must have")
	f.BoolVar(&o.registrarInsecure, "registrar-insecure", false, "speak to registrars without TLS; only on the loopback, for trials")
	f.BoolVar(&o.registrarWhole, "registrar-whole", false, "keep the rows of all services, not only of those that this node needs")
	f.StringVar(&o.nodeAccount, "node-account", "aether-system/aether-agent", "namespace and ServiceAccount of this node's own identity, which registrars ask for")
	f.StringVar(&o.healthSock, "health-sock", "", "with --registrar: path of a Unix socket, as /run/aether/health.sock, where GET /healthz/health_<pod> is 200 while the pod's application answers its probe, 503 while it does not, and 404 for a pod that is not here; empty: none")
	f.StringVar(&o.nodeForm, "node-spiffe-id", "", "SPIFFE ID of this node instead of --node-account's, or its path in the trust domain, with {node} for the name of --node: /node/{node}. A registrar whose --writer has the same lets a node write its own rows alone")
	f.StringSliceVar(&o.identities, "allow-spiffe-id", nil, "SPIFFE IDs that rows of registrars may name (aether.io/spiffe-id), or their paths in the trust domain, beside /ns/{namespace}/*, those of the pod's own namespace. \"/*\" at the end: all below. As at the registrars")
	f.StringVar(&o.cluster, "cluster", "local", "name of the cluster, as in the registry")
	f.BoolVar(&o.kubernetes, "kubernetes", false, "take Services, routes, filters and MeshConfig from the API server of the cluster that this process runs in")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "or from that of this kubeconfig file")
	f.StringVar(&o.clusterPods, "cluster-pods", "", "with --registrar and --kubernetes or --kubeconfig: what the API server's word on this node's pods does (rbac-pods.yaml allows it). "+
		"watch: a pod whose deletion it tells of drains, and a pod that it has no more is forgotten. evict: the same, and pods in the mesh that run here though their add was lost "+
		"are evicted so that they are made anew: after three minutes, 2 a minute, PodDisruptionBudgets respected, and none before a first pod has been added here. off: nothing. "+
		"Default evict, or off where --config says which pods there are")
	f.StringVar(&o.namespace, "namespace", "aether-system", "namespace of the control plane, whose MeshConfig counts")
	f.StringVar(&o.udsDir, "uds-dir", model.DefaultUDSDir, "directory in which each pod's own, named by its UID, has the Unix socket that the pod is delivered to where it, or an EndpointPolicy, asks for that; empty: all are delivered to over TCP")
	f.StringVar(&o.lastGood, "last-good", "", "file for what this node last knew of the mesh: it serves that after a start at which a source cannot be heard; empty: none is kept")
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/aether", "directory for what this node has to know again after a restart")
	f.StringVar(&o.podsDir, "pods-dir", "", "with --registrar: directory for the records of this node's pods, of this process and its successors alone; default pods/<node> in --state-dir")
	f.StringVar(&o.node, "node", "", "name of this node, as in spec.nodeName (required)")
	f.StringVar(&o.domain, "mesh-domain", model.DefaultDomain, "domain of mesh names")
	f.StringVar(&o.trustDomain, "trust-domain", "", "SPIFFE trust domain; default the mesh domain")
	f.StringVar(&o.netnsDir, "netns-dir", "/run/netns", "where the pods' network namespaces are, by default as <namespace>_<pod name>")
	f.StringVar(&o.certs, "certs", "", "directory of <namespace>/<account>/{svid.pem,svid_key.pem,svid_bundle.pem}")
	f.StringVar(&o.devCA, "dev-ca", "", "directory of a throw-away CA instead of --certs: for trials, never for production")
	f.StringVar(&o.handover, "handover", "", "path of the Unix socket by which the next process takes this one's listening sockets over; empty: none does")
	f.DurationVar(&o.drainTime, "drain-time", 10*time.Second, "how long what is under way may take after SIGTERM or a hand-over; what is left is cut")
	f.StringVar(&o.adminAddr, "admin", "127.0.0.1:9901", "address of the admin; empty: none")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error; 'aetherctl loglevel' changes it while the proxy runs")
	f.StringVar(&o.logFormat, "log-format", "text", "of the log on stderr: text or json")
	f.StringVar(&o.blocking, "blocking", "safe", "how an event loop waits: safe, or adapt, which keeps its processor for 5 ms: a tenth less of the processor's time at middling rates, and longer pauses of the garbage collector where others want the processors")
	f.StringVar(&o.records, "records", "own", "who seals TLS records: own or std (crypto/tls)")
	f.IntVar(&o.minLoops, "min-loops", 1, "event loops from the start; more open when those there are have no time left")
	f.IntVar(&o.maxLoops, "max-loops", 0, "most event loops; 0: as many as processors")
	f.StringVar(&o.memoryLimit, "memory-limit", "", "memory that the proxy may use, such as 384MiB; as it is neared, work is given up step by step. Default: GOMEMLIMIT, else 90 % of the control group's limit, else none")
	f.DurationVar(&o.userTimeout, "tcp-user-timeout", 0, "TCP_USER_TIMEOUT of raw-TCP and passed-through connections: also a peer that is well and reads nothing for so long is cut; 0: off, and only a peer that answers nothing for a minute is")
	f.DurationVar(&o.idleTimeout, "tcp-idle-timeout", 0, "cut raw-TCP and passed-through connections on which no byte has moved for so long; 0: off")
	f.BoolVar(&o.capture, "capture", false, "install the capture rules in the node's pods, as the CNI plugin does in a cluster")
	f.StringVar(&o.authz, "authz", extauthz.Target, "the authorization service that extAuthz filters ask (gRPC, envoy.service.auth.v3)")
	f.BoolVar(&o.compat, "envoy-peers", false, "accept Envoy-based sources: TLS 1.2, no server name")
	f.BoolVar(&o.redirectAll, "redirect-all-default", true, "capture all outbound TCP of pods that do not say")
	f.BoolVar(&o.failureLog, "failure-log", true, "write a line of JSON on stdout for each request and connection that failed, a few a second and cause")
	f.BoolVar(&o.statsPod, "emit-stats-pod", false, "put the pod's own name into aether_requests_total: a series for each pod")
	f.BoolVar(&o.accessLog, "access-log", false, "log a line at the end of each request and connection")
	if err := c.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(plain.NewWriter(os.Stderr), "aether-proxy:", err)
		os.Exit(1)
	}
}

// relay reads the settings of raw TCP. The kernel counts the user timeout in milliseconds, in 31 bits.
func (o *options) relay() (relay.Options, error) {
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"--tcp-user-timeout", o.userTimeout}, {"--tcp-idle-timeout", o.idleTimeout}} {
		if f.d != 0 && (f.d < time.Second || f.d > 24*24*time.Hour) {
			return relay.Options{}, fmt.Errorf("%s: %s is not between 1s and 576h: write such a time, or 0 for none", f.name, f.d)
		}
	}
	return relay.Options{UserTimeout: o.userTimeout, Idle: o.idleTimeout}, nil
}

// run serves until ctx ends, or drains first once leave is closed.
func run(ctx context.Context, leave <-chan struct{}, o options) error {
	if err := o.checkSources(); err != nil {
		return err
	}
	level := new(slog.LevelVar)
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	var log *slog.Logger
	switch how := (&slog.HandlerOptions{Level: level}); o.logFormat {
	case "text":
		log = slog.New(slog.NewTextHandler(plain.NewWriter(os.Stderr), how))
	case "json":
		log = slog.New(slog.NewJSONHandler(plain.NewWriter(os.Stderr), how))
	default:
		return fmt.Errorf("--log-format: %q is neither text nor json", o.logFormat)
	}
	if o.trustDomain == "" {
		o.trustDomain = o.domain
	}
	if o.minLoops < 1 || o.maxLoops > 0 && o.minLoops > o.maxLoops {
		return fmt.Errorf("--min-loops: %d: write 1 at least, and no more than --max-loops", o.minLoops)
	}
	if o.drainTime < 0 {
		return fmt.Errorf("--drain-time: %s is negative; 0 cuts at once", o.drainTime)
	}
	memory, err := dataplane.ParseBytes(o.memoryLimit)
	if err != nil {
		return fmt.Errorf("--memory-limit: %w", err)
	}
	memory, memoryFrom := dataplane.MemoryLimit(memory, "/")
	owner := &listen.Owner{}
	cfg := dataplane.Config{Owner: owner, Memory: memory, Capture: o.capture, Authz: o.authz, Compat: o.compat, MaxLoops: o.maxLoops, MinLoops: o.minLoops, Log: log}
	if cfg.Relay, err = o.relay(); err != nil {
		return err
	}
	switch o.blocking {
	case "adapt":
		cfg.Blocking = reactor.Adapt
	case "safe":
		cfg.Blocking = reactor.Safe
	default:
		return fmt.Errorf("--blocking: %q is neither adapt nor safe", o.blocking)
	}
	switch o.records {
	case "own":
		cfg.Records = record.Own
	case "std":
		cfg.Records = record.Std
	default:
		return fmt.Errorf("--records: %q is neither own nor std", o.records)
	}
	if cfg.Identities, err = identities(o, log); err != nil {
		return err
	}
	// A loop may hold its processor while it waits; the rest of the program needs one too.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), 2) + 1)

	ring := journal.NewRing(512)
	metrics := telemetry.New(telemetry.Config{Pods: o.statsPod})
	observers := journal.Tee{ring, metrics} // whatever watches requests attaches here (journal.Observer)
	if o.failureLog {
		failures := telemetry.NewFailures(telemetry.FailureConfig{Out: os.Stdout})
		observers = append(observers, failures)
		metrics.Count("aether_failure_log_dropped_total", "Lines of the failure log that found its queue full.", &failures.Dropped)
		metrics.Count("aether_failure_log_suppressed_total", "Lines of the failure log that their cause had too many of.", &failures.Suppressed)
		defer runFailures(failures)()
	}
	access := journal.NewLog(log)
	observers = append(observers, access)
	cfg.Journal = observers
	before, err := takeOver(ctx, leave, o, owner, log)
	if err != nil {
		return err
	}
	cfg.StartPaused = before != nil
	var told *sources // set before the node runs
	if len(o.registrar) > 0 {
		cfg.Want = func(n model.ServiceName) { told.want(n) }
		cfg.Ready = func(container string) bool { return told.pods.Ready(container) }
	}
	node, err := dataplane.New(cfg)
	if err != nil {
		return err
	}
	metrics.Count("aether_retries_total", "Requests sent once more.", &node.Outbound().Retries)
	metrics.Count("aether_retries_overflow_total", "Requests not sent once more, because too many others were.", &node.Outbound().RetriesOverflow)
	h := &handover{o: o, log: log, node: node, owner: owner, before: before, lead: make(chan struct{}), taken: make(chan struct{})}
	told = newSources(o, node, cfg.Identities, log)
	told.lead, told.left = h.lead, [...]<-chan struct{}{leave, h.taken}
	sources := told
	sources.cfg.OnSettings = func(s input.Settings, of map[string]input.Settings) {
		logs, pods := map[string]journal.Share{}, map[string]bool{}
		for ns, s := range of {
			logs[ns], pods[ns] = journal.Share{On: s.AccessLogs, Success: s.AccessLogSuccess}, s.EmitStatsPod
		}
		access.Set(journal.Share{On: s.AccessLogs, Success: s.AccessLogSuccess}, logs)
		metrics.SetPods(s.EmitStatsPod, pods)
		if err := node.HopFromNode(s.HopFromNode); err != nil {
			log.Warn("not in force", "object", "MeshConfig", "reason", err)
		}
	}
	if err := sources.build(); err != nil {
		return err
	}
	loop := sources.loop
	h.loop, h.idle = loop, sources.idle
	sources.gauges(metrics)
	node.Register(metrics)

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	errs := make(chan error, 3+len(sources.run))
	start := func(name string, f func() error) {
		wg.Go(func() {
			if err := f(); err != nil {
				errs <- fmt.Errorf("%s: %w", name, err)
			}
			stop() // whatever ends, all end
		})
	}
	if o.adminAddr != "" {
		h.admin = &http.Server{
			ReadHeaderTimeout: 10 * time.Second,
			Handler: sources.admin(admin.Handler(admin.Config{
				Node: node, Why: ring, Metrics: metrics.Handler(), Level: level,
				Report: loop.Report,
				Wait: func(ctx context.Context, synced bool, seq uint64) error {
					if synced {
						return loop.WaitSynced(ctx)
					}
					return loop.Wait(ctx, seq)
				},
				Dump: func() []byte { return file.Dump(loop.Mesh()) },
			})),
		}
	}
	start("hand-over", func() error { return h.run(ctx, leave) })
	start("configuration", func() error { return loop.Run(ctx) })
	for _, s := range sources.run {
		start(s.name, func() error { return s.run(ctx) })
	}
	start("data plane", func() error { return node.Run(ctx) })
	log.Info("aether-proxy", "node", o.node, "config", o.config, "trust-domain", o.trustDomain, "admin", o.adminAddr, "memory-limit", memory, "from", memoryFrom)
	if err := ended(ctx, wg.Wait, endTime); err != nil {
		return err
	}
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// endTime is what there is for everything to end once the process is to.
const endTime = 5 * time.Second

// ended waits for wait, but no longer than limit once ctx has ended.
func ended(ctx context.Context, wait func(), limit time.Duration) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-done:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("not everything has ended within %s, such as a loop that is stuck: the rest is cut, and capture rules may stay behind", limit)
	}
}

func identities(o options, log *slog.Logger) (mtls.Source, error) {
	switch {
	case o.certs != "" && o.devCA != "":
		return nil, errors.New("--certs and --dev-ca exclude each other")
	case o.certs != "":
		return files.New(files.Config{Dir: o.certs}), nil
	case o.devCA != "":
		ca, err := devca.Open(o.devCA, o.trustDomain, nil)
		if err != nil {
			return nil, err
		}
		log.Warn("THROW-AWAY CA in use: identities prove nothing; not for production", "dir", o.devCA)
		return ca.Source(0), nil
	}
	return nil, errors.New("no identities: give --certs (files that something keeps fresh) or, for a trial, --dev-ca")
}

// runFailures starts f, and returns what ends it: not before it has written what
// waits, and not after it is clear that nobody reads.
func runFailures(f *telemetry.Failures) (end func()) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.Run(ctx)
	}()
	return func() {
		stop()
		select {
		case <-done:
		case <-time.After(2 * time.Second): // stuck in a write to a pipe that is full
		}
	}
}
