{{/* The release's name, once where it says kept already; short enough for what is appended. */}}
{{- define "kept.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kept" .Release.Name) (contains "kept" .Release.Name) -}}
{{- if gt (len $name) 40 }}{{ fail (printf "release name %s: with it pods would be named %s-0; 40 characters are the most" .Release.Name $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "kept.selector" -}}
app.kubernetes.io/name: kept
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kept.labels" -}}
{{ include "kept.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kept.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Where nodes reach each other: POD.SERVICE.NAMESPACE.svc.DOMAIN. */}}
{{- define "kept.domain" -}}
{{ include "kept.name" . }}-nodes.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "kept.voters" -}}
{{- $voters := list -}}
{{- range $i := until (int .Values.voters) -}}
{{- $voters = append $voters (printf "%d@%s-%d.%s:10092" $i (include "kept.name" $) $i (include "kept.domain" $)) -}}
{{- end -}}
{{- join "," $voters -}}
{{- end -}}

{{/* A quantity of Kubernetes, such as 500m or 2Gi, as a plain number. */}}
{{- define "kept.amount" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- printf "%.3f" (mulf (float64 $number) (float64 (get $units (trimPrefix $number .)))) -}}
{{- else -}}
{{- printf "%.3f" (float64 .) -}}
{{- end -}}
{{- end -}}

{{/* What values.schema.json cannot say: values that contradict each other. */}}
{{- define "kept.check" -}}
{{- if gt (int .Values.voters) (int .Values.replicas) -}}
{{- fail (printf "voters: %d of %d nodes cannot vote; give voters a number up to replicas" (int .Values.voters) (int .Values.replicas)) -}}
{{- end -}}
{{- $factor := int (index .Values.config "default.replication.factor" | default (min 3 (int .Values.replicas))) -}}
{{- if gt $factor (int .Values.replicas) -}}
{{- fail (printf "config: default.replication.factor=%d wants that many nodes, and replicas is %d" $factor (int .Values.replicas)) -}}
{{- end -}}
{{- $isr := int (index .Values.config "min.insync.replicas" | default (ternary 2 1 (ge (int .Values.replicas) 3))) -}}
{{- if gt $isr $factor -}}
{{- fail (printf "config: min.insync.replicas=%d of default.replication.factor=%d replicas can never be in sync" $isr $factor) -}}
{{- end -}}
{{- range $name, $limit := .Values.resources.limits -}}
{{- $request := index (default dict $.Values.resources.requests) $name -}}
{{- if and $request (gt (float64 (include "kept.amount" $request)) (float64 (include "kept.amount" $limit))) -}}
{{- fail (printf "resources: %s: requests has %v, which is more than the %v of limits" $name $request $limit) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.external.enabled (eq .Values.external.type "NodePort") -}}
{{- $first := int .Values.external.firstNodePort -}}
{{- $last := sub (add $first (int .Values.replicas)) 1 -}}
{{- if or (lt $first 30000) (gt (int $last) 32767) -}}
{{- fail (printf "external.firstNodePort: %d nodes from %d on want ports up to %d; Kubernetes has 30000 to 32767" (int .Values.replicas) $first $last) -}}
{{- end -}}
{{- end -}}
{{- include "kept.checkSecurity" . -}}
{{- end -}}

{{/* The same of tls, auth, and what depends on them. */}}
{{- define "kept.checkSecurity" -}}
{{- $tls := .Values.tls -}}
{{- $auth := .Values.auth -}}
{{- if $tls.enabled -}}
{{- if and $tls.issuerRef.name $tls.existingSecret -}}
{{- fail (printf "tls: issuerRef.name=%s and existingSecret=%s are both given; the certificate comes from one of them" $tls.issuerRef.name $tls.existingSecret) -}}
{{- end -}}
{{- if not (or $tls.issuerRef.name $tls.existingSecret) -}}
{{- fail "tls.enabled: where does the certificate come from? Give tls.issuerRef.name, an issuer of cert-manager, or tls.existingSecret, a Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and $tls.issuerRef.name (not (regexMatch "^CN=[A-Za-z0-9._-]+$" $tls.nodePrincipal)) -}}
{{- fail (printf "tls.nodePrincipal: with cert-manager the subject is CN=NAME, not %s" $tls.nodePrincipal) -}}
{{- end -}}
{{- if ge (int (trimSuffix "h" $tls.renewBefore)) (int (trimSuffix "h" $tls.duration)) -}}
{{- fail (printf "tls.renewBefore: a certificate of %s cannot be renewed %s before it ends" $tls.duration $tls.renewBefore) -}}
{{- end -}}
{{- else -}}
{{- range $name, $value := dict "tls.issuerRef.name" $tls.issuerRef.name "tls.existingSecret" $tls.existingSecret -}}
{{- if $value -}}
{{- fail (printf "%s: %s is given, and tls.enabled is false, so nothing would be encrypted; set tls.enabled=true" $name $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $auth.enabled -}}
{{- if not $tls.enabled -}}
{{- fail "auth.enabled: wants tls.enabled=true; without TLS whoever reaches the port for nodes is taken for a node, and may do everything" -}}
{{- end -}}
{{- if not $auth.adminSecret -}}
{{- fail (printf "auth.enabled: nobody could log in; give auth.adminSecret, a Secret whose key password is the first password of %s" $auth.adminUser) -}}
{{- end -}}
{{- if eq (include "kept.scramMechanisms" .) "" -}}
{{- fail "auth.mechanisms: without SCRAM it does not do, the first user has a credential of SCRAM; add SCRAM-SHA-512" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor (not .Values.monitoring.basicAuthSecret) -}}
{{- fail "monitoring.serviceMonitor: with auth.enabled Prometheus has to log in; give monitoring.basicAuthSecret, a Secret with username and password of a user who may describe the cluster" -}}
{{- end -}}
{{- else -}}
{{- range $name, $value := dict "auth.adminSecret" $auth.adminSecret "auth.superUsers" $auth.superUsers "monitoring.basicAuthSecret" .Values.monitoring.basicAuthSecret -}}
{{- if $value -}}
{{- fail (printf "%s: %v is given, and auth.enabled is false, so nobody would log in; set auth.enabled=true" $name $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not .Values.networkPolicy.enabled -}}
{{- range $name, $value := dict "clients" .Values.networkPolicy.clients "metricsNamespace" .Values.networkPolicy.metricsNamespace "egress" .Values.networkPolicy.egress "jwks" .Values.networkPolicy.jwks -}}
{{- if $value -}}
{{- fail (printf "networkPolicy.%s is given, and networkPolicy.enabled is false, so everybody may connect; set networkPolicy.enabled=true" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.networkPolicy.jwks -}}
{{- if not .Values.networkPolicy.egress -}}
{{- fail "networkPolicy.jwks is given, and networkPolicy.egress is false, so nodes may connect to everything; set networkPolicy.egress=true" -}}
{{- end -}}
{{- if eq (include "kept.jwksPort" .) "" -}}
{{- fail "networkPolicy.jwks is given, and nodes fetch no keys; add OAUTHBEARER to auth.mechanisms and an https:// address as sasl.oauthbearer.jwks.endpoint.url to config" -}}
{{- end -}}
{{- else if and .Values.networkPolicy.egress (include "kept.jwksPort" .) -}}
{{- fail (printf "networkPolicy.egress: would keep nodes from %s, and they would believe no access token; name its addresses or pods in networkPolicy.jwks" (index .Values.config "sasl.oauthbearer.jwks.endpoint.url")) -}}
{{- end -}}
{{- range $name, $_ := .Values.config -}}
{{- if regexMatch "^(ssl\\.(keystore|truststore|key)\\.|ssl\\.allow\\.san|sasl\\.enabled|authorizer\\.|super\\.users$|kept\\.bootstrap\\.scram$|kept\\.node\\.network\\.|kept\\.sasl\\.plain|security\\.)" $name -}}
{{- fail (printf "config: %s is set by the values tls and auth" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The port at which nodes fetch the keys of access tokens; "": they fetch none. */}}
{{- define "kept.jwksPort" -}}
{{- $url := index .Values.config "sasl.oauthbearer.jwks.endpoint.url" | default "" | toString -}}
{{- if and .Values.auth.enabled (has "OAUTHBEARER" .Values.auth.mechanisms) (hasPrefix "https://" $url) -}}
{{- regexFind ":[0-9]+$" (urlParse $url).host | trimPrefix ":" | default "443" -}}
{{- end -}}
{{- end -}}

{{/* The Secret of the nodes' certificate. */}}
{{- define "kept.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "kept.name" .)) }}
{{- end -}}

{{/* What listeners of clients speak. */}}
{{- define "kept.protocol" -}}
{{ if .Values.auth.enabled }}SASL_{{ end }}{{ ternary "SSL" "PLAINTEXT" .Values.tls.enabled }}
{{- end -}}

{{- define "kept.scramMechanisms" -}}
{{- $scram := list -}}
{{- range .Values.auth.mechanisms -}}
{{- if hasPrefix "SCRAM-" . -}}{{- $scram = append $scram . -}}{{- end -}}
{{- end -}}
{{- join "," $scram -}}
{{- end -}}

{{/* Names of the nodes' certificate. */}}
{{- define "kept.names" -}}
{{- $name := include "kept.name" . -}}
{{- $service := printf "%s.%s" $name .Release.Namespace -}}
{{- $names := list (printf "*.%s" (include "kept.domain" .)) (printf "%s.svc.%s" $service .Values.clusterDomain) (printf "%s.svc" $service) $service $name "localhost" -}}
{{- if .Values.external.enabled -}}
{{- range $i := until (int .Values.replicas) -}}
{{- $names = append $names (printf "%s-%d.%s" $name $i $.Values.external.domain) -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $names .Values.tls.extraNames) -}}
{{- end -}}

{{/* Properties of a client that is the administrator, or without logins anybody. */}}
{{- define "kept.clientProperties" -}}
security.protocol={{ include "kept.protocol" . }}
{{- if .Values.auth.enabled }}
sasl.mechanism={{ first (splitList "," (include "kept.scramMechanisms" .)) }}
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required username="{{ .Values.auth.adminUser }}" password="${directory:/etc/kept-admin:password}";
{{- end }}
ssl.truststore.type=PEM
ssl.truststore.certificates=${directory:/etc/kept-tls:ca.crt}
{{- end -}}

{{/* Volumes of secrets and where they are mounted; nodes and the check before an upgrade have them. */}}
{{- define "kept.secretVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "kept.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if .Values.auth.enabled }}
- name: admin
  secret:
    secretName: {{ .Values.auth.adminSecret }}
    defaultMode: 0440
    items: [{key: password, path: password}]
{{- end }}
{{- end -}}

{{- define "kept.secretMounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/kept-tls, readOnly: true}
{{- end }}
{{- if .Values.auth.enabled }}
- {name: admin, mountPath: /etc/kept-admin, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kept.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kept.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}
